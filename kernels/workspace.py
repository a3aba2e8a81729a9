"""The persistent workspace of a layer: `Workspace`, its handle on shared scratch memory, and `reserve`.

    layer 0 -- Workspace --.
    layer 1 -- Workspace --+--> Scratch of (cpu, None)         bytes; each layer's plan is laid over them
    layer 2 -- Workspace --+
                           '--> Scratch of (cuda:0, stream)    one for each stream that a layer was called on

Attaching registers a layer's facts with its device and allocates nothing. The first call on a stream, or
`reserve`, allocates what the largest registered plan needs; every layer whose plan fits shares it, so
memory does not grow with the number of layers. It never moves or grows: a layer registered later that needs
more gets a new one beside the old, and layers that use the old one keep it. When the last layer that uses a
scratch is dropped, its memory is free.

Nothing survives from one call to the next: a backend writes whatever it reads.

Inside a CUDA graph's capture the scratch comes from torch's allocator, that is from the graph's own pool, for
the length of the call: replays allocate nothing, graphs of different pools may replay at once, and nothing
outlives a graph.

Threads: `Workspace.lease` holds the scratch's lock for the length of a call, so calls of several Python
threads on one device and stream run one after another. (On a CPU each call has all of torch's threads
already.)
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from .ahead import compile_for
from .device import usable_device
from .errors import WorkspaceError
from .plan.buffers import MAX_ROWS, WorkspacePlan
from .plan.problem import LayerFacts
from .plan.workspaces import plan_workspace, usual_backend
from .scratch import Lease, Scratch, StreamKey, current_stream, registry

if TYPE_CHECKING:
    from .layer import MarlinMoELayer

__all__ = ["Lease", "Workspace", "WorkspacePlan", "reserve"]


class Workspace:
    """A layer's handle on the scratch memory of its device. Copying or unpickling one attaches a new one.

    Args:
        facts: the layer's sizes.
        device: where the layer's tensors are.
        max_tokens: tokens that one pass takes; more run in chunks.
        top_k: slots per token; the first call's where None.
    """

    __slots__ = ("__weakref__", "_leases", "backend", "calls", "device", "facts", "max_tokens", "top_k")

    def __init__(
        self, facts: LayerFacts, *, device: torch.device, max_tokens: int, top_k: int | None
    ) -> None:
        _check_count(max_tokens, "max_tokens")
        if top_k is not None:
            _check_count(top_k, "top_k")
        self.facts = facts
        self.device = device
        self.max_tokens = max_tokens
        self.top_k = top_k
        self.backend = usual_backend(facts, device)
        self.calls: dict[Any, Any] = {}  # calls made ready, by what decides how they run
        self._leases: dict[tuple[str, int | None], Lease] = {}  # by backend and stream
        with registry.lock:
            registry.handles.add(self)

    @classmethod
    def attach(cls, layer: "MarlinMoELayer") -> "Workspace":
        """A handle for `layer`: registers its plan with its device and allocates nothing."""
        return cls(LayerFacts.of(layer), device=layer.device, max_tokens=layer.max_tokens, top_k=layer.top_k)

    @property
    def plan(self) -> WorkspacePlan | None:
        """The buffers in use on the current stream, or else to be used; None while top_k is not known."""
        lease = self._current()
        if lease is not None:
            return lease.plan
        return None if self.top_k is None else self._plan(self.max_tokens * self.top_k)

    @property
    def nbytes(self) -> int:
        """Bytes of all scratch that this layer uses, shared with others; 0 before the first call."""
        return sum(scratch.bytes.nbytes for scratch in self._scratches())

    @property
    def scratch(self) -> torch.Tensor | None:
        """uint8 [bytes] of the current stream, of no meaning between calls; None before the first."""
        lease = self._current()
        return None if lease is None else lease.scratch.bytes

    def data_ptr(self) -> int | None:
        """Address of the current stream's scratch, constant from the first call on; None before."""
        return None if self.scratch is None else self.scratch.data_ptr()

    def reserve(self, *, top_k: int | None = None) -> int:
        """Compile and allocate for the current stream now instead of in the first call: bytes of the scratch.

        Raises:
            WorkspaceError: no top_k, neither here nor at attachment; scratch in use is too small; no memory.
            JitError: on CUDA, a kernel did not compile, or may not be and the cache has none.
        """
        slots = self.top_k if top_k is None else top_k
        if slots is None:
            raise WorkspaceError(
                "workspace.reserve: expected top_k, because rows are max_tokens x top_k and the layer was "
                "loaded without it, got None. Give reserve(top_k=...), or load the layer with top_k=."
            )
        _check_count(slots, "top_k")
        rows = self.max_tokens * slots
        self._check_room(rows)
        compile_for([(self.facts, max(rows, self._most_rows(slots)))], self.device)
        lease = self._bind(self.backend, lambda other: rows if other is self else other._most_rows(slots))
        return lease.scratch.bytes.nbytes

    def reset(self) -> None:
        """Clear every stream's scratch after a launch that failed. Running calls end first; nothing moves.

        It waits for all streams of the device, before and after, and calls of other threads wait for it.

        Raises:
            WorkspaceError: inside a capture, where nothing may wait; the device's work does not end well.
        """
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise WorkspaceError(
                f"workspace.reset: expected no capture, because it waits for all that runs on {self.device}, "
                "got a stream that is being captured. Reset before or after; captured calls have scratch of "
                "their graph."
            )
        try:
            for scratch in self._scratches():
                scratch.clear()
        except RuntimeError as error:
            raise WorkspaceError(
                f"workspace.reset: expected {self.device} to end its work, got: {error}. Where another "
                "thread captures, reset after it; after a fault of the device only a new process helps."
            ) from error

    @contextmanager
    def lease(self, *, top_k: int, backend: str = "reference", rows: int | None = None) -> Iterator[Lease]:
        """The current stream's buffers, for the length of one call with `top_k` slots per token.

        `rows` is what the call needs: inside a capture the scratch has no more.
        """
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            most = self._most_rows(top_k)
            yield self.captured(backend, most if rows is None else min(rows, most))
            return
        lease = self.bound(backend, top_k=top_k)
        with lease.scratch.lock:
            yield lease

    def bound(self, backend: str, *, top_k: int) -> Lease:
        """The current stream's buffers outside of captures: those held, or bound now."""
        return self._current(backend) or self._bind(backend, lambda handle: handle._most_rows(top_k))

    def captured(self, backend: str, rows: int) -> Lease:
        """Buffers from the pool of the graph that is being captured."""
        plan = plan_workspace(backend, self.facts, self.device, rows=rows)
        return Lease.lay_over(Scratch.of_graph(StreamKey.current(self.device), plan.nbytes), plan)

    def _scratches(self) -> list[Scratch]:
        """The scratch of all streams and backends, each once."""
        with registry.lock:
            return list({id(lease.scratch): lease.scratch for lease in self._leases.values()}.values())

    def _current(self, backend: str | None = None) -> Lease | None:
        return self._leases.get((backend or self.backend, current_stream(self.device)))

    def _plan(self, rows: int) -> WorkspacePlan:
        return plan_workspace(self.backend, self.facts, self.device, rows=rows)

    def _bind(self, backend: str, rows_of: "Callable[[Workspace], int]") -> Lease:
        """The lease of the current stream: the one held, or on scratch that others use, or on new scratch."""
        key = StreamKey.current(self.device)
        with registry.lock:
            if (backend, key.stream) not in self._leases:
                plan = plan_workspace(backend, self.facts, self.device, rows=rows_of(self))
                scratch = registry.smallest_scratch(key, plan.nbytes)
                if scratch is None:
                    handles = registry.handles_on(self.device)
                    largest = max(
                        plan_workspace(backend, other.facts, self.device, rows=rows_of(other)).nbytes
                        for other in handles
                    )
                    scratch = registry.new_scratch(key, largest)
                self._leases[backend, key.stream] = Lease.lay_over(scratch, plan)
            return self._leases[backend, key.stream]

    def _most_rows(self, top_k: int) -> int:
        """The most rows of a pass where nothing else was reserved; `top_k` is the calls', if not known."""
        return self.max_tokens * (self.top_k or top_k)

    def _check_room(self, rows: int) -> None:
        lease = self._current()
        if lease is not None and lease.plan.rows < min(rows, MAX_ROWS):
            raise WorkspaceError(
                f"reserve: expected room for max_tokens x top_k = {rows:,} rows, got {lease.plan.rows:,} in "
                f"the scratch that a layer ({self.facts}) uses on {self.device} already, and it never grows. "
                "Reserve before the first call, or load with a larger max_tokens."
            )

    def __reduce__(self) -> tuple[Any, ...]:
        return _attach, (self.facts, self.device, self.max_tokens, self.top_k)

    def __repr__(self) -> str:
        return (
            f"Workspace({self.facts}, device={self.device}, max_tokens={self.max_tokens}, "
            f"top_k={self.top_k}, nbytes={self.nbytes:,})"
        )


def reserve(device: torch.device | str | int, *, max_tokens: int, top_k: int) -> int:
    """Compile ahead for every layer on `device`, and allocate on the current stream: bytes of its scratch.

    Layers that have none on this stream yet get max_tokens x top_k rows, whatever they were loaded with.

    Raises:
        MarlinMoEError: there is no such device.
        WorkspaceError: no layer is registered; a layer has smaller scratch, which never grows; no memory.
        JitError: on CUDA, a kernel did not compile, or may not be and the cache has none.
    """
    _check_count(max_tokens, "max_tokens")
    _check_count(top_k, "top_k")
    place = usable_device(device)  # as tensors name it: "cuda" is the current device
    rows = max_tokens * top_k
    with registry.lock:
        handles = registry.handles_on(place)
        if not handles:
            raise WorkspaceError(
                f"reserve: expected layers on {place}, because its size follows from theirs, got none. "
                "Load them first."
            )
        for handle in handles:
            handle._check_room(rows)
    # Other streams and captures take what a layer was loaded with, whatever this one gets.
    compile_for([(handle.facts, max(rows, handle._most_rows(top_k))) for handle in handles], place)
    with registry.lock:
        return max(handle._bind(handle.backend, lambda _: rows).scratch.bytes.nbytes for handle in handles)


def _attach(facts: LayerFacts, device: torch.device, max_tokens: int, top_k: int | None) -> Workspace:
    return Workspace(facts, device=device, max_tokens=max_tokens, top_k=top_k)


def _check_count(value: int, name: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}: expected an int, got {type(value).__name__} {value!r}.")
    if value < 1:
        raise WorkspaceError(f"{name}: expected at least 1, got {value}.")
