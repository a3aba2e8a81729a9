"""The arguments of `cuda/moe.cu` as bytes: the host's side of `cuda/args.cuh`.

bytes     C++                          what
0..31     x .. expert_map              pointers of the call
32..111   w13, w2                      MatrixArgs: qweight, scales, zero_points, sort_order, bias
112       out
120..191  tile_count .. split_sums     pointers into the scratch, in the order of the workspace's plan
192..207  x_stride, out_stride         in elements
208..243  tokens .. most_slot_splits
244..263  routed_scaling_factor .. linear_beta
264       flags                        the second parameter
"""

import struct

import torch

from ..activation import Activation
from ..matrix import MarlinMatrix

PARAMETERS = struct.Struct("<24Q2q9i5fi")
KINDS = ("silu", "gelu", "gelu_tanh", "swiglu_oai", "silu_clamped", "situ", "silu_no_mul", "relu2")
"""Activations in the order of `ActivationKind` in `cuda/activation.cuh`."""

IDS64, WEIGHTS_FP32, WEIGHT_ON_INPUT, SLOTS_FP32 = 1, 2, 4, 8
"""`Flags` in `cuda/moe.cu`."""


def matrix_addresses(matrix: MarlinMatrix) -> tuple[int, int, int, int, int]:
    """The pointers of MatrixArgs; 0 for what the matrix does not have."""
    return (
        matrix.qweight.data_ptr(),
        matrix.scales.data_ptr(),
        *(0 if t is None else t.data_ptr() for t in (matrix.zero_points, matrix.sort_order, matrix.bias)),
    )  # type: ignore[return-value]


def activation_numbers(activation: Activation) -> tuple[float, float, float, float]:
    """alpha, limit, beta, linear_beta; 0 for what the activation does not have."""
    a = activation
    return (a.alpha or 0.0, a.limit or 0.0, a.beta or 0.0, a.linear_beta or 0.0)


def flags_of(
    topk_ids: torch.Tensor, topk_weights: torch.Tensor, *, weight_on_input: bool, slots_fp32: bool
) -> int:
    """The flags of a call."""
    return (
        IDS64 * (topk_ids.dtype == torch.int64)
        | WEIGHTS_FP32 * (topk_weights.dtype == torch.float32)
        | WEIGHT_ON_INPUT * weight_on_input
        | SLOTS_FP32 * slots_fp32
    )
