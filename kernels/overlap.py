"""Whether two tensors lie in the same bytes: `share_memory`."""

import torch


def share_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether elements of two tensors may lie in the same bytes.

    Exact for contiguous tensors and for matrices, side by side in one buffer too, where their row strides
    agree; True in doubt.
    """
    if a.numel() == 0 or b.numel() == 0 or a.device != b.device:
        return False
    a_start, a_end = _bounds(a)
    b_start, b_end = _bounds(b)
    if a_end <= b_start or b_end <= a_start:
        return False
    a_row, a_width = _rows(a, a_end - a_start)
    b_row, b_width = _rows(b, b_end - b_start)
    row = a_row or b_row
    if row == 0 or (a_row and b_row and a_row != b_row):
        return True
    offset = (b_start - a_start) % row
    side_by_side = offset >= a_width and offset + b_width <= row
    return not side_by_side


def _bounds(tensor: torch.Tensor) -> tuple[int, int]:
    """(address of the first byte, address after the last byte)."""
    start, size = tensor.data_ptr(), tensor.element_size()
    if tensor.is_contiguous():
        return start, start + tensor.numel() * size
    last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * size


def _rows(tensor: torch.Tensor, nbytes: int) -> tuple[int, int]:
    """(bytes from row to row, bytes that a row spans); (0, all) of what is taken as one piece."""
    if tensor.dim() != 2 or tensor.shape[0] == 1 or tensor.is_contiguous():
        return 0, nbytes
    size = tensor.element_size()
    return tensor.stride(0) * size, ((tensor.shape[1] - 1) * tensor.stride(1) + 1) * size
