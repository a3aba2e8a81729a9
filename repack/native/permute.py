"""Scales and zero points -> Marlin order: by the kernel on a CUDA device, else by torch operations.

They are 1/8 to 1/128 of the bytes. On a CPU torch moves them in a fraction of the time that the weights take;
on a GPU its strided copies would take longer than the weights.
"""

import torch

from ...kernels import layout
from .cuda_repack import ELEMENTS, pack_zero_points_on_device, permute_scales_on_device
from .path import native_path


def permute_scales(weight_scale: torch.Tensor) -> torch.Tensor:
    """Marlin scales [B, G, N] of a checkpoint's [B, N, G]; the order depends on G alone.

    Raises:
        LayoutError: N is no multiple of 64.
    """
    if not _by_kernel(weight_scale) or weight_scale.element_size() not in ELEMENTS:
        return layout.permute_scales(weight_scale)
    experts, columns, groups = weight_scale.shape
    layout.check_columns(columns, "weight_scale")
    return permute_scales_on_device(weight_scale, weight_scale.new_empty(experts, groups, columns))


def pack_zero_points(weight_zero_point: torch.Tensor, *, bits: int) -> torch.Tensor:
    """Marlin zero points int32 [B, G, N*bits/32] of a checkpoint's [B, N*bits/32, G].

    Raises:
        LayoutError: N is no multiple of 64.
    """
    if not _by_kernel(weight_zero_point) or weight_zero_point.dtype != torch.int32:
        return layout.pack_zero_points(weight_zero_point, bits=bits)
    experts, words, groups = weight_zero_point.shape
    layout.check_columns(words * 32 // bits, "weight_zero_point")
    out = weight_zero_point.new_empty(experts, groups, words)
    return pack_zero_points_on_device(weight_zero_point, out, bits=bits)


def _by_kernel(tensor: torch.Tensor) -> bool:
    return tensor.is_cuda and tensor.dim() == 3 and native_path(tensor.device).used
