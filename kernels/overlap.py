"""Whether tensors lie in the same bytes: `first_overlap`."""

from collections.abc import Iterable

import torch


def first_overlap(tensor: torch.Tensor, others: Iterable[tuple[str, torch.Tensor | None]]) -> str | None:
    """The name of the first of the others that may have elements in the same bytes, or None.

    Exact for contiguous tensors and for matrices, side by side in one buffer too, where their row strides
    agree; a name in doubt. All are on one device.
    """
    if tensor.numel() == 0:
        return None
    start, end = _bounds(tensor)
    for name, other in others:
        if other is None or other.data_ptr() >= end:
            continue
        other_start, other_end = _bounds(other)
        if other_end > start and other.numel() and not _side_by_side(tensor, other, other_start - start):
            return name
    return None


def _side_by_side(a: torch.Tensor, b: torch.Tensor, distance: int) -> bool:
    """Whether the rows of one, `distance` bytes behind the other, all lie between the other's."""
    (a_row, a_width), (b_row, b_width) = _rows(a), _rows(b)
    row = a_row or b_row
    if row == 0 or (a_row and b_row and a_row != b_row):
        return False
    offset = distance % row
    return offset >= a_width and offset + b_width <= row


def _bounds(tensor: torch.Tensor) -> tuple[int, int]:
    """(address of the first byte, address after the last byte)."""
    start = tensor.data_ptr()
    if tensor.is_contiguous():
        return start, start + tensor.nbytes
    size = tensor.element_size()
    last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * size


def _rows(tensor: torch.Tensor) -> tuple[int, int]:
    """(bytes from row to row, bytes that a row spans); (0, all) of what is taken as one piece."""
    if tensor.dim() != 2 or tensor.shape[0] == 1 or tensor.is_contiguous():
        start, end = _bounds(tensor)
        return 0, end - start
    size = tensor.element_size()
    return tensor.stride(0) * size, ((tensor.shape[1] - 1) * tensor.stride(1) + 1) * size
