"""What the CUDA kernels are told: tensors as their bytes lie, addresses, numbers, flags.

The arguments of `cuda/moe.cu` and `cuda/decode.cu`, `PARAMETERS`, are the host's side of `cuda/args.cuh`:

bytes     C++                          what
0..31     x .. expert_map              pointers of the call
32..111   w13, w2                      MatrixArgs: qweight, scales, zero_points, sort_order, bias
112       out
120..191  tile_count .. split_sums     pointers into the scratch: `SCRATCH`
192..207  x_stride, out_stride         in elements
208..243  tokens .. most_slot_splits
244..263  routed_scaling_factor .. linear_beta
264       flags                        the second parameter
"""

import struct

import torch

from ..activation import Activation
from ..arguments import MoEArguments
from ..layer import MarlinMoELayer
from ..matrix import MarlinMatrix
from ..plan.problem import LayerFacts

VECTOR_BYTES = 16
PARAMETERS = struct.Struct("<24Q2q9i5fi")
SCRATCH = (
    *("tile_count", "sorted_slots", "slot_is_here", "tile_expert", "tile_row", "tile_rows"),
    *("activations", "w2_output", "split_sums"),
)
"""Names of the buffers in the workspace's plan."""

KINDS = ("silu", "gelu", "gelu_tanh", "swiglu_oai", "silu_clamped", "situ", "silu_no_mul", "relu2")
"""Activations in the order of `ActivationKind` in `cuda/activation.cuh`."""

IDS64, WEIGHTS_FP32, WEIGHT_ON_INPUT, SLOTS_FP32 = 1, 2, 4, 8
"""`Flags` in `cuda/moe.cu`."""


def has_vector_rows(x: torch.Tensor) -> bool:
    """Whether x's rows can be read as they lie, in vectors of 16 bytes."""
    row_bytes = x.stride(0) * x.element_size()
    aligned = row_bytes % VECTOR_BYTES == 0 and x.data_ptr() % VECTOR_BYTES == 0
    return x.stride(1) == 1 and aligned and not x.is_neg()


def with_vector_rows(x: torch.Tensor) -> torch.Tensor:
    """x, or a copy of it where its rows cannot be read so."""
    return x if has_vector_rows(x) else x.clone(memory_format=torch.contiguous_format)


def as_it_lies(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy whose values are its bytes in order: contiguous, and not negated lazily."""
    return tensor.resolve_neg().contiguous()


def matrices_of(layer: MarlinMoELayer) -> tuple[int, ...]:
    """The addresses of both MatrixArgs, which never move."""
    return (*matrix_addresses(layer.w13), *matrix_addresses(layer.w2))


def sizes_of(arguments: MoEArguments, facts: LayerFacts) -> tuple[int, ...]:
    """top_k .. activation, which all kernels are told in this order behind `tokens`."""
    return (
        arguments.topk_ids.shape[1],
        facts.num_experts,
        facts.num_global_experts,
        facts.hidden_size,
        facts.padded_intermediate_size,
        KINDS.index(arguments.activation.kind),
    )


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
