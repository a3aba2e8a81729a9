"""Where each buffer of a backend lies in the scratch memory: `BufferPlan`, `WorkspacePlan`."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from ..errors import WorkspaceError

Need = tuple[str, torch.dtype, tuple[int, ...]]
"""A buffer that something needs: name, dtype, shape."""

MAX_ROWS = 2**31 - 1  # numbers of rows and slots are int32; more rows run in chunks
ALIGNMENT_BYTES = 256  # what CUDA's own allocations guarantee, and more than any vector load asks for


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferPlan:
    """One buffer: contiguous, `nbytes` from `offset_bytes` on."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset_bytes: int

    @property
    def nbytes(self) -> int:
        """Bytes of the buffer, without what aligns the next one."""
        return math.prod(self.shape) * self.dtype.itemsize

    def view(self, scratch: torch.Tensor) -> torch.Tensor:
        """The buffer as a view of uint8 [nbytes] scratch memory."""
        return scratch[self.offset_bytes : self.offset_bytes + self.nbytes].view(self.dtype).view(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkspacePlan:
    """All buffers that a layer needs for `rows` rows; a row is one (token, slot) pair that reaches an expert.

    `str(plan)` is the table of the buffers.
    """

    title: str
    rows: int
    buffers: tuple[BufferPlan, ...]

    @classmethod
    def lay_out(cls, title: str, *, rows: int, buffers: Iterable[Need]) -> "WorkspacePlan":
        """The plan of (name, dtype, shape) buffers, one behind the other, each aligned to 256 bytes."""
        placed: list[BufferPlan] = []
        end = 0
        for name, dtype, shape in buffers:
            placed.append(BufferPlan(name=name, dtype=dtype, shape=shape, offset_bytes=_aligned(end)))
            end = placed[-1].offset_bytes + placed[-1].nbytes
        return cls(title=title, rows=rows, buffers=tuple(placed))

    @property
    def nbytes(self) -> int:
        """Bytes of the scratch memory that holds all buffers."""
        last = self.buffers[-1]
        return _aligned(last.offset_bytes + last.nbytes)

    def __str__(self) -> str:
        lines = [f"{self.title}, {self.rows:,} rows: {self.nbytes:,} bytes"]
        lines.append(f"  {'buffer':<16}{'dtype':<10}{'shape':<20}{'offset':>16}{'bytes':>16}")
        for buffer in self.buffers:
            dtype = str(buffer.dtype).removeprefix("torch.")
            shape = " x ".join(map(str, buffer.shape))
            lines.append(
                f"  {buffer.name:<16}{dtype:<10}{shape:<20}{buffer.offset_bytes:>16,}{buffer.nbytes:>16,}"
            )
        return "\n".join(lines)


def planned_rows(rows: int) -> int:
    """The rows that are planned where `rows` are asked for: no more than their numbers can tell apart.

    Raises:
        WorkspaceError: none are asked for.
    """
    if rows < 1:
        raise WorkspaceError(
            f"workspace: expected at least one row, got {rows}. Give max_tokens and top_k from 1 on."
        )
    return min(rows, MAX_ROWS)


def overlaid(*needs: Iterable[Need]) -> list[Need]:
    """The buffers of several that never run at once: those of one name are one, as large as the largest.

    They stand in the order in which they are met.
    """
    found: dict[str, Need] = {}
    for need in (need for each in needs for need in each):
        name = need[0]
        if name not in found or _nbytes(need) > _nbytes(found[name]):
            found[name] = need
    return list(found.values())


def _nbytes(need: Need) -> int:
    _, dtype, shape = need
    return math.prod(shape) * dtype.itemsize


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
