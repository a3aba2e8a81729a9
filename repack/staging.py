"""Memory that blocks are read into, one after another; for a GPU pinned, with a stream and a thread each.

    lane 0   read block 0 | copy | ...........| read block 4 |
    lane 1    read block 1  | copy |            ...
    caller                    stages of block 0 | stages of block 1 | ...

On a CPU one block follows the other in one `HostMemory`: the same pages, touched once. For a GPU several
blocks are on their way at once. A lane reads into its pinned memory, copies on its stream and waits for the
copies; other lanes read meanwhile, and the caller's stages run on the caller's own stream. Results come in
order.
"""

import math
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from queue import SimpleQueue
from typing import TypeVar

import torch

MAX_LANES = 4
ALIGNMENT_BYTES = 256  # of every tensor in pinned memory

Item = TypeVar("Item")
Result = TypeVar("Result")


class HostMemory:
    """CPU memory that blocks are read into, one after another."""

    def __init__(self, nbytes: int, *, pinned: bool = False) -> None:
        self._pinned = pinned
        self._memory = torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=pinned)
        self._used_bytes = 0

    def clear(self) -> None:
        """For the next block: tensors of the one before will be written over."""
        self._used_bytes = 0

    def empty(self, shape: Sequence[int], dtype: torch.dtype | None) -> torch.Tensor:
        """A contiguous CPU tensor, until the next `clear`; `dtype` as in `torch.empty`.

        Beside the memory where that is full: converted or repeated scales take more than in the file.
        """
        dtype = dtype or torch.get_default_dtype()
        nbytes = math.prod(shape) * dtype.itemsize
        start, self._used_bytes = self._used_bytes, self._used_bytes + aligned(nbytes)
        if self._used_bytes > self._memory.numel():
            return torch.empty(shape, dtype=dtype, device="cpu", pin_memory=self._pinned)
        return self._memory[start : start + nbytes].view(dtype).view(shape)


class Lane(HostMemory):
    """Pinned memory that a thread reads a block into, and the stream that copies it to a device."""

    def __init__(self, device: torch.device, nbytes: int) -> None:
        super().__init__(nbytes, pinned=True)
        self.device = device
        self._stream = torch.cuda.Stream(device)

    @contextmanager
    def work(self) -> Iterator[None]:
        """The lane's stream as the current one, its memory empty; at the end all on the stream is done."""
        self.clear()
        with torch.cuda.device(self._stream.device), torch.cuda.stream(self._stream):
            try:
                yield
            finally:
                self._stream.synchronize()

    def follow_caller(self) -> None:
        """What the lane does from now on comes after all that the calling thread's stream was given."""
        self._stream.wait_stream(torch.cuda.current_stream(self.device))


def lane_count(device: torch.device) -> int:
    """How many blocks are read at once: none on a CPU, where the caller reads into the layer's own memory."""
    return max(2, min(MAX_LANES, torch.get_num_threads())) if device.type == "cuda" else 0


def make_lanes(device: torch.device, nbytes: int) -> tuple[Lane, ...]:
    """Lanes that have `nbytes` of pinned memory each and follow the caller's stream; none on a CPU.

    torch keeps pinned memory that is freed, so the next layer gets the same.
    """
    lanes = tuple(Lane(device, nbytes) for _ in range(lane_count(device)))
    for lane in lanes:
        lane.follow_caller()
    return lanes


def hand_over(tensors: Iterable[tuple[str, torch.Tensor]], device: torch.device) -> None:
    """Tensors that a lane has made and finished, to the calling thread's stream.

    The allocator gives their memory back to the lane; it must know that another stream still reads them.
    """
    stream = torch.cuda.current_stream(device)
    for _, tensor in tensors:
        if tensor.is_cuda:
            tensor.record_stream(stream)


def aligned(nbytes: int) -> int:
    """Bytes that a tensor of `nbytes` takes in a lane."""
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def read_ahead(
    items: Iterable[Item], read: Callable[[Item, Lane | None], Result], lanes: Sequence[Lane]
) -> Generator[Result, None, None]:
    """`read(item, lane)` of every item, in order. Close it (`contextlib.closing`) when it is left early.

    Without lanes each is read in this thread when it is asked for. With lanes they are read on threads, as
    many at once as there are lanes and at most one more than that ahead. An error is raised where its
    result would come; what is being read then is waited for, the rest is not begun.
    """
    if not lanes:
        for item in items:
            yield read(item, None)
        return
    free: SimpleQueue[Lane] = SimpleQueue()
    for lane in lanes:
        free.put(lane)

    def run(item: Item) -> Result:
        lane = free.get()
        try:
            with lane.work():
                return read(item, lane)
        finally:
            free.put(lane)

    waiting: deque[Future[Result]] = deque()
    with ThreadPoolExecutor(len(lanes), thread_name_prefix="marlin-moe-read") as pool:
        try:
            for item in items:
                waiting.append(pool.submit(run, item))
                if len(waiting) > len(lanes):
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()
