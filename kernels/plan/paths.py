"""Which path runs a call, by its rows alone: decode for few, prefill for many on Hopper, general elsewhere.

    1 ........ decode_rows | ....... general ....... | prefill_rows ........ any number

Each path has one range of rows, which may be empty; `decode_rows` and `prefill_rows` are the borders.
"""

import functools
from dataclasses import dataclass
from enum import StrEnum

from . import decode, prefill
from .estimate import decode_ns, prefill_ns
from .problem import LayerFacts

LEAST_ITEMS = 128
"""Work items of each GEMM from which on the prefill path takes over.

An item is a tile of columns of one expert over all of K: fewer than an H200 has multiprocessors (132) leave
some without work, and the general path splits K instead. Nearly every layer has as many where decode ends (32
rows a global expert, at most 2048): all but those with fewer than four such tiles on a rank, or fewer than a
sixteenth of the global experts. Neither path is measured there.
"""


class Path(StrEnum):
    """A way to run a call on CUDA: `decode.cu`, `moe.cu`, or the kernels of `prefill_*.cu`."""

    DECODE = "decode"
    GENERAL = "general"
    PREFILL = "prefill"


@dataclass(frozen=True, slots=True, kw_only=True)
class RowRange:
    """The rows that a path runs: `first` .. `last`, or from `first` on where last is None."""

    path: Path
    first: int
    last: int | None

    def holds(self, rows: int) -> bool:
        """Whether the path runs `rows` rows."""
        return self.first <= rows and (self.last is None or rows <= self.last)


def choose_path(facts: LayerFacts, *, rows: int, arch: str) -> Path:
    """The path for `rows` rows of a layer, slots of other ranks included, on an architecture."""
    return next(part.path for part in row_ranges(facts, arch=arch) if part.holds(rows))


def row_ranges(facts: LayerFacts, *, arch: str, most: int | None = None) -> tuple[RowRange, ...]:
    """The paths that 1 .. `most` rows take, or any number where None: in order of rows, none empty."""
    ranges = _all_ranges(facts, arch)
    if most is None:
        return ranges
    clipped = (
        RowRange(path=part.path, first=part.first, last=most if part.last is None else min(most, part.last))
        for part in ranges
    )
    return tuple(part for part in clipped if part.last is not None and part.first <= part.last)


@functools.lru_cache(maxsize=1024)
def _all_ranges(facts: LayerFacts, arch: str) -> tuple[RowRange, ...]:
    few = decode_rows(facts, arch=arch)
    many = prefill_rows(facts, arch=arch, after=few)
    ranges = [RowRange(path=Path.DECODE, first=1, last=few)] if few else []
    if many != few + 1:
        ranges.append(RowRange(path=Path.GENERAL, first=few + 1, last=None if many is None else many - 1))
    if many is not None:
        ranges.append(RowRange(path=Path.PREFILL, first=many, last=None))
    return tuple(ranges)


def decode_rows(facts: LayerFacts, *, arch: str) -> int:
    """The last row number of the decode path; 0 where it runs nothing.

    Where the prefill path runs the layer too, up to where that is estimated to be faster; else all it takes.
    """
    most = decode.max_rows(facts)
    if prefill.reason_against(facts, arch) is not None:
        return most
    slower = (
        rows for rows in range(1, most + 1) if decode_ns(facts, rows=rows) > prefill_ns(facts, rows=rows)
    )
    return next(slower, most + 1) - 1


def prefill_rows(facts: LayerFacts, *, arch: str, after: int) -> int | None:
    """The first row number of the prefill path, above `after`; None where it does not run the layer.

    From there on both GEMMs have `LEAST_ITEMS` work items, if each row has an expert of its own.
    """
    if prefill.reason_against(facts, arch) is not None:
        return None
    items_of_a_row = min(prefill.column_tiles(facts)) * facts.num_experts  # over num_global_experts
    return max(after + 1, -(-LEAST_ITEMS * facts.num_global_experts // items_of_a_row))
