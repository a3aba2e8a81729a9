"""Scratch memory and who is alive to use it: `StreamKey`, `Scratch`, `Lease`, `registry`."""

import os
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from .errors import WorkspaceError
from .plan.buffers import WorkspacePlan

if TYPE_CHECKING:
    from .workspace import Workspace


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamKey:
    """Calls of one device and stream run in order and share scratch; a CPU has no streams."""

    device: torch.device
    stream: int | None

    @classmethod
    def current(cls, device: torch.device) -> "StreamKey":
        """The key of the calling thread's current stream."""
        return cls(device=device, stream=current_stream(device))


def current_stream(device: torch.device) -> int | None:
    """The calling thread's current stream as the driver numbers it; None on a CPU."""
    if device.type != "cuda":
        return None
    stream: int = torch._C._cuda_getCurrentRawStream(
        device.index
    )  # torch.cuda.current_stream: ten times dearer
    return stream


class Scratch:
    """Bytes at one address for as long as a layer uses them; `lock` is held while a call does."""

    __slots__ = ("__weakref__", "bytes", "key", "lock")

    def __init__(self, key: StreamKey, scratch: torch.Tensor) -> None:
        self.key = key
        self.lock = threading.Lock()
        self.bytes = scratch

    @classmethod
    def allocate(cls, key: StreamKey, nbytes: int) -> "Scratch":
        """Uninitialised bytes that stay.

        Torch's current pool is not asked on CUDA: the warm-up run of torch.compile and `use_mem_pool`
        redirect a thread's allocations into a graph's pool, where nothing may stay. So a short-lived thread
        of its own allocates, with the stream set.
        """
        if key.device.type != "cuda":
            return cls(key, _empty(key, nbytes))
        with ThreadPoolExecutor(max_workers=1, thread_name_prefix="marlin-moe-scratch") as thread:
            return cls(key, thread.submit(_empty_on_stream, key, nbytes).result())

    @classmethod
    def of_graph(cls, key: StreamKey, nbytes: int) -> "Scratch":
        """Bytes from the pool of the graph that is being captured."""
        return cls(key, _empty(key, nbytes))

    def clear(self) -> None:
        """Zeros, once all that runs on the device has ended, and before another call starts."""
        with self.lock:
            _wait_for(self.key.device)
            self.bytes.zero_()
            _wait_for(self.key.device)


def _wait_for(device: torch.device) -> None:
    """Wait for every stream of a device; on a CPU nothing runs on."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _empty(key: StreamKey, nbytes: int) -> torch.Tensor:
    try:
        # A tensor made in inference mode could never be written outside of it.
        with torch.inference_mode(False):
            return torch.empty(nbytes, dtype=torch.uint8, device=key.device)
    except RuntimeError as error:
        raise WorkspaceError(
            f"workspace on {key.device}: expected {nbytes:,} bytes for the largest registered layer, "
            f"got: {error}. Load with a smaller max_tokens; more tokens then run in chunks."
        ) from error


def _empty_on_stream(key: StreamKey, nbytes: int) -> torch.Tensor:
    stream = torch.cuda.ExternalStream(key.stream or 0, device=key.device)
    with torch.cuda.device(key.device), torch.cuda.stream(stream):
        return _empty(key, nbytes)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Lease:
    """A layer's plan laid over a scratch: `buffers` and their `addresses`, by name."""

    scratch: Scratch
    plan: WorkspacePlan
    buffers: dict[str, torch.Tensor]
    addresses: dict[str, int]

    @classmethod
    def lay_over(cls, scratch: Scratch, plan: WorkspacePlan) -> "Lease":
        """The plan's buffers as views of the scratch."""
        with torch.inference_mode(False):
            buffers = {buffer.name: buffer.view(scratch.bytes) for buffer in plan.buffers}
        start = scratch.bytes.data_ptr()
        addresses = {buffer.name: start + buffer.offset_bytes for buffer in plan.buffers}
        return cls(scratch=scratch, plan=plan, buffers=buffers, addresses=addresses)


class Registry:
    """What is alive: handles (held by their layers) and scratches (held by leases). Keeps neither alive."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.handles: weakref.WeakSet[Workspace] = weakref.WeakSet()
        self.scratches: weakref.WeakSet[Scratch] = weakref.WeakSet()

    def handles_on(self, device: torch.device) -> "list[Workspace]":
        """The handles of all live layers on `device`."""
        return [handle for handle in self.handles if handle.device == device]

    def smallest_scratch(self, key: StreamKey, nbytes: int) -> Scratch | None:
        """The smallest live scratch of `key` with at least `nbytes`."""
        fitting = [
            scratch for scratch in self.scratches if scratch.key == key and scratch.bytes.nbytes >= nbytes
        ]
        return min(fitting, key=lambda scratch: scratch.bytes.nbytes, default=None)

    def new_scratch(self, key: StreamKey, nbytes: int) -> Scratch:
        """A scratch that later layers of `key` find."""
        scratch = Scratch.allocate(key, nbytes)
        self.scratches.add(scratch)
        return scratch

    def renew_locks(self) -> None:
        """For a forked child, where a thread that held a lock does not exist."""
        self.lock = threading.RLock()
        for scratch in self.scratches:
            scratch.lock = threading.Lock()


registry = Registry()
os.register_at_fork(after_in_child=registry.renew_locks)
