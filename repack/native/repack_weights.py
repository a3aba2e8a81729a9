"""Packed words -> Marlin tiles and back, by the C loop, the kernel or torch operations (`path` decides)."""

from collections.abc import Iterator

import torch

from ...kernels.errors import LayoutError
from ...kernels.layout import check_packed_shape, check_qweight_shape, pack_qweight, unpack_qweight
from .cuda_repack import pack_on_device, unpack_on_device
from .path import load_extension, native_path

PIECE_BYTES = 2 << 20
"""Packed bytes that torch's operations take at once on a CPU."""


def repack_weights(
    weight_packed: torch.Tensor, *, bits: int, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Marlin `qweight` of a block of experts' packed words.

    Args:
        weight_packed: int32 [B, N, K*bits/32] in compressed-tensors' layout: unsigned values, low bits first
            along K. The last dimension is contiguous; B and N may have any strides: a slice needs no copy.
        bits: 4 or 8.
        out: int32 [B, K/16, N*bits/2] to fill; the last dimension is contiguous, the others may have any
            strides that keep its rows apart. None allocates it.

    Returns:
        `out`, or the new tensor, on the device of `weight_packed`. The same bytes on every path and device.

    Raises:
        LayoutError: a shape, dtype, device or stride is not as above, K is no multiple of 16 or N of 64, or
            `out` overlaps itself or `weight_packed`.
        MarlinMoEError: MARLIN_MOE_NATIVE is set to something impossible, or the kernel cannot be compiled.
    """
    check_source(weight_packed, bits=bits)
    if out is None:
        out = weight_packed.new_empty(qweight_shape(weight_packed, bits=bits))
    else:
        check_destination(out, weight_packed, bits=bits)
    path = native_path(weight_packed.device)
    if weight_packed.numel() == 0 or weight_packed.is_meta:
        return out
    if path.variant is None:
        run_torch(weight_packed, out, bits=bits)
        return out
    if weight_packed.is_cuda:
        return pack_on_device(weight_packed, out, bits=bits)
    run_c_loop(weight_packed, out, bits=bits, variant=path.variant)
    return out


def run_torch(weight_packed: torch.Tensor, out: torch.Tensor, *, bits: int) -> None:
    """Fill `out` by torch's operations: any device, the same bytes, slower."""
    for experts in _pieces(weight_packed):
        out[experts].copy_(pack_qweight(weight_packed[experts], bits=bits))


def _pieces(weight_packed: torch.Tensor) -> Iterator[slice]:
    """Experts in pieces whose temporaries stay in a CPU's cache; all at once elsewhere."""
    count = len(weight_packed)
    size = (
        count if weight_packed.device.type != "cpu" else max(1, PIECE_BYTES * count // weight_packed.nbytes)
    )
    for start in range(0, count, size):
        yield slice(start, start + size)


def unpack_weights(qweight: torch.Tensor, *, bits: int) -> torch.Tensor:
    """The checkpoint's packed words int32 [B, N, K*bits/32] of Marlin `qweight` [B, K/16, N*bits/2].

    By the C loop on a CPU, the kernel on a CUDA device, else by torch operations: the same bytes.

    Raises:
        LayoutError: a shape or dtype that no `qweight` has.
        MarlinMoEError: as in `repack_weights`.
    """
    n, k = check_qweight_shape(qweight, bits=bits)
    if qweight.is_meta:  # torch would import its compiler to find the shapes of the operations
        return qweight.new_empty(*qweight.shape[:-2], n, k * bits // 32)
    if qweight.dim() != 3 or qweight.stride(2) != 1 or not native_path(qweight.device).used:
        return unpack_qweight(qweight, bits=bits)
    out = qweight.new_empty(qweight.shape[0], n, k * bits // 32)
    if qweight.is_cuda:
        return unpack_on_device(qweight, out, bits=bits)
    _unpack_in_c(qweight, out, bits=bits)
    return out


def _unpack_in_c(qweight: torch.Tensor, out: torch.Tensor, *, bits: int) -> None:
    """Fill `out` [B, N, K*bits/32] by the C loop, on this thread and without the GIL."""
    extension = load_extension()
    if isinstance(extension, str):
        raise ImportError(extension)
    experts, rows, _ = qweight.shape
    extension.unpack(
        bits,
        qweight.data_ptr(),
        *(stride * 4 for stride in qweight.stride()[:2]),
        out.data_ptr(),
        *(stride * 4 for stride in out.stride()[:2]),
        experts,
        out.shape[1],
        rows,
    )


def run_c_loop(weight_packed: torch.Tensor, out: torch.Tensor, *, bits: int, variant: str) -> None:
    """Fill `out` by the C loop with an instruction set of `_native.variants()`.

    On torch.get_num_threads() threads, without the GIL. The tensors must have passed check_source and
    check_destination: the loop sees addresses only.

    Raises:
        ValueError: this processor or build has no such variant.
        ImportError: there is no C loop.
    """
    extension = load_extension()
    if isinstance(extension, str):
        raise ImportError(extension)
    experts, columns, _ = weight_packed.shape
    extension.repack(
        variant,
        bits,
        torch.get_num_threads(),
        weight_packed.data_ptr(),
        *(stride * 4 for stride in weight_packed.stride()[:2]),
        out.data_ptr(),
        *(stride * 4 for stride in out.stride()[:2]),
        experts,
        columns,
        out.shape[1],
    )


def qweight_shape(weight_packed: torch.Tensor, *, bits: int) -> tuple[int, int, int]:
    """(B, K/16, N*bits/2)."""
    experts, columns, words = weight_packed.shape
    return experts, words * 2 // bits, columns * bits // 2


def check_source(weight_packed: torch.Tensor, *, bits: int) -> None:
    """Raise LayoutError unless the packed words can be repacked where they are."""
    check_packed_shape(weight_packed, bits=bits)
    if weight_packed.dim() != 3 or weight_packed.stride(2) != 1:
        raise LayoutError(
            "weight_packed: expected [experts, N, K*bits/32] with a contiguous last dimension, because a "
            f"column's words are read in order, got {describe(weight_packed)}. Stack the experts, "
            "or call .contiguous()."
        )


def check_destination(out: torch.Tensor, weight_packed: torch.Tensor, *, bits: int) -> None:
    """Raise LayoutError unless every word of the result has a place of its own in `out`."""
    shape = qweight_shape(weight_packed, bits=bits)
    if tuple(out.shape) != shape or out.dtype != torch.int32 or out.device != weight_packed.device:
        raise LayoutError(
            f"out: expected int32 {shape} on {weight_packed.device}, because weight_packed is "
            f"{tuple(weight_packed.shape)} with {bits} bits, got {describe(out)}."
        )
    if out.numel() == 0:
        return
    if out.stride(2) != 1 or overlaps_itself(out):
        raise LayoutError(
            "out: expected a contiguous last dimension and rows that lie apart, because every word is "
            f"written once, got {describe(out)}. Pass a tensor or a slice of one, not transposed or expanded."
        )
    if out.device.type != "meta" and share_memory(out, weight_packed):
        raise LayoutError(
            "out: expected memory apart from weight_packed, which is read while out is written, got tensors "
            "whose first to last bytes overlap. Leave out `out`, or pass a tensor of its own."
        )


def describe(tensor: torch.Tensor) -> str:
    """Dtype, shape, device and strides, for an error."""
    return f"{tensor.dtype} {tuple(tensor.shape)} on {tensor.device} with strides {tensor.stride()}"


def overlaps_itself(tensor: torch.Tensor) -> bool:
    """Do elements share memory? Only says no where each dimension steps over all of the smaller ones."""
    extent = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride < extent:
            return True
        extent += stride * (size - 1)
    return False


def share_memory(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Do the spans from the first to the last byte of two tensors overlap?"""
    (first_start, first_end), (second_start, second_end) = span(first), span(second)
    return first_start < second_end and second_start < first_end


def span(tensor: torch.Tensor) -> tuple[int, int]:
    """Addresses of the first byte and of the one behind the last."""
    last = sum(stride * (size - 1) for stride, size in zip(tensor.stride(), tensor.shape, strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()
