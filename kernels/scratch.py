"""Scratch memory and who is alive to use it: `StreamKey`, `Scratch`, `Lease`, `registry`."""

import os
import threading
import weakref
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
        stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else None
        return cls(device=device, stream=stream)


class Scratch:
    """Bytes at one address for as long as a layer uses them; `lock` is held while a call does."""

    __slots__ = ("__weakref__", "bytes", "key", "lock")

    def __init__(self, key: StreamKey, nbytes: int) -> None:
        self.key = key
        self.lock = threading.Lock()
        try:
            # A tensor made in inference mode could never be written outside of it.
            with torch.inference_mode(False):
                self.bytes = torch.empty(nbytes, dtype=torch.uint8, device=key.device)
        except RuntimeError as error:
            raise WorkspaceError(
                f"workspace on {key.device}: expected {nbytes:,} bytes for the largest registered layer, "
                f"got: {error}. Load with a smaller max_tokens; more tokens then run in chunks."
            ) from error


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Lease:
    """A layer's plan laid over a scratch: `buffers` by name, each a view at a constant address."""

    scratch: Scratch
    plan: WorkspacePlan
    buffers: dict[str, torch.Tensor]

    @classmethod
    def lay_over(cls, scratch: Scratch, plan: WorkspacePlan) -> "Lease":
        """The plan's buffers as views of the scratch."""
        with torch.inference_mode(False):
            buffers = {buffer.name: buffer.view(scratch.bytes) for buffer in plan.buffers}
        return cls(scratch=scratch, plan=plan, buffers=buffers)


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
        scratch = Scratch(key, nbytes)
        self.scratches.add(scratch)
        return scratch

    def renew_locks(self) -> None:
        """For a forked child, where a thread that held a lock does not exist."""
        self.lock = threading.RLock()
        for scratch in self.scratches:
            scratch.lock = threading.Lock()


registry = Registry()
os.register_at_fork(after_in_child=registry.renew_locks)
