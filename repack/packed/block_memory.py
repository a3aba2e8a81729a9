"""Memory for a block's results between the stages and a file; on a GPU two blocks are on their way at once.

stages      block 0 -> first | block 1 -> second | (first is free again) block 2 -> first | ...
copying                      first -> pinned     | second -> pinned
writing                        pinned -> file      | pinned -> file
"""

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from ..blocks import TensorSpec

Tensors = Mapping[str, torch.Tensor]


class BlockMemory:
    """Tensors that take a block's results, and then go to `write` in CPU memory, block after block in order.

    On a CPU `write` is called by `commit`; on a GPU by a thread, and what it raises is raised by a later
    `take`, `commit` or `drain`.
    """

    def __init__(
        self, specs: Mapping[str, TensorSpec], device: torch.device, write: Callable[[Tensors], None]
    ) -> None:
        self._specs, self._write = dict(specs), write
        self._slots: list[_Slot] = [_CpuSlot()]
        self._turn = 0
        self._device = device
        self._pool: ThreadPoolExecutor | None = None
        if device.type == "cuda":
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="marlin-moe-write")
            self._slots = [_CudaSlot(self._pool, device) for _ in range(2)]

    def take(self, count: int) -> Tensors:
        """Tensors for `count` experts; those of an earlier block, where its results are written."""
        return self._slots[self._turn].take(self._specs, self._device, count)

    def commit(self, count: int) -> None:
        """The first `count` experts of what was taken last hold their results."""
        self._slots[self._turn].commit(count, self._write)
        self._turn = (self._turn + 1) % len(self._slots)

    def drain(self) -> None:
        """Everything committed is written."""
        for slot in self._slots[self._turn :] + self._slots[: self._turn]:  # the older one first
            slot.wait()

    def close(self) -> None:
        """No thread runs any more; what is not written yet is dropped."""
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)


class _Slot:
    """One block's memory."""

    def __init__(self) -> None:
        self.memory: dict[str, torch.Tensor] = {}

    def take(self, specs: Mapping[str, TensorSpec], device: torch.device, count: int) -> Tensors:
        self.wait()
        for name, spec in specs.items():
            held = self.memory.get(name)
            if held is None or held.shape[0] < count:
                self.memory[name] = torch.empty((count, *spec.shape[1:]), dtype=spec.dtype, device=device)
        return {name: held[:count] for name, held in self.memory.items()}

    def commit(self, count: int, write: Callable[[Tensors], None]) -> None:
        raise NotImplementedError

    def wait(self) -> None:
        """What was committed last is written."""


class _CpuSlot(_Slot):
    def commit(self, count: int, write: Callable[[Tensors], None]) -> None:
        write({name: held[:count].cpu() for name, held in self.memory.items()})


class _CudaSlot(_Slot):
    """With pinned memory of the same size, a stream that copies into it, and the thread that writes."""

    def __init__(self, pool: ThreadPoolExecutor, device: torch.device) -> None:
        super().__init__()
        self._pool = pool
        self._stream = torch.cuda.Stream(device)
        self._pinned: dict[str, torch.Tensor] = {}
        self._written: Future[None] | None = None

    def commit(self, count: int, write: Callable[[Tensors], None]) -> None:
        done = torch.cuda.Event()
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            for name, held in self.memory.items():
                pinned = self._pinned.get(name)
                if pinned is None or pinned.shape[0] < held.shape[0]:
                    pinned = torch.empty(held.shape, dtype=held.dtype, device="cpu", pin_memory=True)
                    self._pinned[name] = pinned
                pinned[:count].copy_(held[:count], non_blocking=True)
                held.record_stream(self._stream)
            done.record()
        results = {name: pinned[:count] for name, pinned in self._pinned.items()}

        def finish() -> None:
            done.synchronize()
            write(results)

        self._written = self._pool.submit(finish)

    def wait(self) -> None:
        written, self._written = self._written, None
        if written is not None:
            written.result()
