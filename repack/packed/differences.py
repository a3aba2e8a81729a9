"""Two tensors' or files' bytes side by side: where they first differ, and how."""

import ctypes
import math
from dataclasses import asdict, dataclass
from typing import Any

import torch

from ..tensor_file import DTYPES, TensorEntry

MEMCMP = ctypes.CDLL(None).memcmp
MEMCMP.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)

SAME_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One thing that is wrong with a packed checkpoint.

    Attributes:
        name: the tensor or file.
        message: what was expected, what was found.
        expert: the expert that the tensor belongs to, where it is one's.
        coordinate: of the first value that differs; None where nothing was compared value by value.
        packed_value, source_value: the two values there.
        differing: how many values differ in the piece compared.
    """

    name: str
    message: str
    expert: int | None = None
    coordinate: tuple[int, ...] | None = None
    packed_value: float | int | str | None = None
    source_value: float | int | str | None = None
    differing: int | None = None

    def __str__(self) -> str:
        return self.message

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def first_difference(
    packed: torch.Tensor,
    source: torch.Tensor,
    entry: TensorEntry,
    *,
    expert: int | None = None,
    first_byte: int = 0,
) -> Problem | None:
    """The first of the source's values that packed bytes do not give, or None where all agree bit by bit.

    Args:
        packed, source: uint8 [n]: the same stretch of the tensor, from the packed checkpoint and from the
            source.
        entry: the tensor in the source.
        expert: whose it is.
        first_byte: where the stretch starts within the tensor.
    """
    if same_bytes(packed, source):
        return None
    dtype = DTYPES.get(entry.dtype)
    size = dtype.itemsize if dtype is not None else 1
    items = SAME_SIZE.get(size, torch.uint8)
    wrong = torch.nonzero(packed.view(items) != source.view(items)).flatten()
    at = int(wrong[0])
    values = [_value(t, at, size, dtype) for t in (packed, source)]
    coordinate = (
        _coordinate(first_byte // size + at, entry.shape) if dtype is not None else (first_byte + at,)
    )
    return Problem(
        name=entry.name,
        message=(
            f"{entry.name}: expected the source's value {values[1]} at {list(coordinate)}, got {values[0]} "
            f"from the packed checkpoint ({len(wrong)} values differ in {entry.file})."
        ),
        expert=expert,
        coordinate=coordinate,
        packed_value=values[0],
        source_value=values[1],
        differing=len(wrong),
    )


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two contiguous CPU tensors of one size hold the same bytes.

    By the C library, without the GIL: many times the speed of `torch.equal` on tensors of a megabyte.
    """
    return a.nbytes == b.nbytes and MEMCMP(a.data_ptr(), b.data_ptr(), a.nbytes) == 0


def _value(data: torch.Tensor, at: int, size: int, dtype: torch.dtype | None) -> float | int | str:
    item = data[at * size : (at + 1) * size].clone()
    value = item.view(dtype)[0].item() if dtype is not None else int(item[0])
    return value if isinstance(value, int) or math.isfinite(value) else str(value)


def _coordinate(index: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The place of a flat index; () for a scalar."""
    place = []
    for length in reversed(shape):
        place.append(index % length)
        index //= length
    return tuple(reversed(place))
