"""What the library must compute, from the contract's text alone: slow, obvious, nothing shared with it.

In the order in which they build on each other:
  oracle_formats   words of a checkpoint → integers → exact float weights
  oracle_marlin    one matrix in the Marlin layout
  oracle_layer     experts as integers; cutting, padding and stacking them
  oracle_folder    a checkpoint directory → experts as integers; expected values beside it
This file: one rank's layer, its dense weights, and the layer's output.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from oracle_formats import (
    dequantize,
    group_of_columns,
    unpack_awq,
    unpack_ct,
    unpack_ct_zero_points,
    unpack_gptq,
    unpack_gptq_zero_points,
)
from oracle_layer import (
    ExpectedLayer,
    ExpectedMatrix,
    Expert,
    Projection,
    Refused,
    concatenate,
    cut_and_pad_down,
    experts_of_rank,
    pad_rows,
    sorted_columns,
    sorting_order,
    stack,
)
from oracle_marlin import (
    grouped_columns,
    marlin_bias,
    marlin_qweight,
    marlin_scales,
    marlin_zero_points,
    scales_of_marlin,
    single_columns,
    values_of_marlin,
    zero_points_of_marlin,
)

__all__ = [
    "ExpectedLayer",
    "ExpectedMatrix",
    "Expert",
    "Projection",
    "Refused",
    "dequantize",
    "expected_dense",
    "expected_layer",
    "group_of_columns",
    "grouped_columns",
    "marlin_bias",
    "marlin_qweight",
    "marlin_scales",
    "marlin_zero_points",
    "moe",
    "scales_of_marlin",
    "silu_and_mul",
    "single_columns",
    "unpack_awq",
    "unpack_ct",
    "unpack_ct_zero_points",
    "unpack_gptq",
    "unpack_gptq_zero_points",
    "values_of_marlin",
    "zero_points_of_marlin",
]


def expected_layer(
    experts: Sequence[Expert], *, tp_rank: int = 0, tp_size: int = 1, ep_rank: int = 0, ep_size: int = 1
) -> ExpectedLayer:
    """The tensors that rank (tp_rank, ep_rank) must hold.

    Order: w2's columns and w13's output rows (each half) go by w2's stable group order; w13's own order is
    kept as `sort_order`. Then the slice of the unpadded I, then zeros up to a multiple of 64. w2's bias is TP
    rank 0's, elsewhere it is 0. Orders are given whenever the source has a g_idx, trivial or not.

    Raises Refused where no exact cut exists.
    """
    local = experts_of_rank(len(experts), ep_rank, ep_size)
    hidden_size, total = experts[0].down.values.shape
    if total % tp_size:
        raise Refused(f"I = {total} is not divisible by {tp_size}")
    if hidden_size % 64:
        raise Refused(f"H = {hidden_size} is not a multiple of 64")
    for matrix in (experts[0].gate, experts[0].up, experts[0].down):
        if matrix.num_groups > 1 and matrix.group_size not in (32, 64, 128):
            raise Refused(f"groups of {matrix.group_size}")
    slice_size = total // tp_size
    padded = -(-slice_size // 64) * 64
    w13, w2, sort_orders, intermediate_orders = [], [], [], []
    for index in local:
        gate, up, down = experts[index].gate, experts[index].up, experts[index].down
        if sorting_order(gate) != sorting_order(up):
            raise Refused(f"gate and up of expert {index} have different orders")
        order = sorting_order(down)[tp_rank * slice_size : (tp_rank + 1) * slice_size]
        halves = [pad_rows(sorted_columns(half).rows(order), padded) for half in (gate, up)]
        w13.append(concatenate(*halves))
        down = cut_and_pad_down(sorted_columns(down), tp_rank, tp_size, padded)
        if down.bias is not None and tp_rank > 0:
            down = replace(down, bias=torch.zeros_like(down.bias))
        w2.append(down)
        sort_orders.append(sorting_order(gate))
        intermediate_orders.append(order)
    w13_ordered = any(e.gate.g_idx is not None for e in experts)
    w2_ordered = any(e.down.g_idx is not None for e in experts)
    expert_map = torch.full((len(experts),), -1, dtype=torch.int32)
    for position, index in enumerate(local):
        expert_map[index] = position
    return ExpectedLayer(
        w13=stack(w13, sort_orders if w13_ordered else None),
        w2=stack(w2, None),
        intermediate_order=torch.tensor(intermediate_orders, dtype=torch.int32) if w2_ordered else None,
        intermediate_size=slice_size,
        hidden_size=hidden_size,
        num_experts=len(local),
        num_global_experts=len(experts),
        expert_map=expert_map if ep_size > 1 else None,
    )


def expected_dense(
    experts: Sequence[Expert], *, tp_rank: int = 0, tp_size: int = 1, ep_rank: int = 0, ep_size: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """Exact float32 w13 [E, 2·I/TP, H] and w2 [E, H, I/TP] of a rank, without padding.

    In the source's order of I; a TP rank of an act-order layer gives its slice of the sorted order.
    """
    w13, w2 = [], []
    for index in experts_of_rank(len(experts), ep_rank, ep_size):
        expert = experts[index]
        total = expert.down.values.shape[1]
        slice_size = total // tp_size
        order = sorting_order(expert.down) if tp_size > 1 else list(range(total))
        kept = order[tp_rank * slice_size : (tp_rank + 1) * slice_size]
        w13.append(torch.cat([expert.gate.dense()[kept], expert.up.dense()[kept]]))
        w2.append(expert.down.dense()[:, kept])
    return torch.stack(w13), torch.stack(w2)


def silu_and_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return gate / (1 + torch.exp(-gate)) * up


def moe(
    x: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    activation: Callable[..., torch.Tensor] = silu_and_mul,
    *,
    w13_bias: torch.Tensor | None = None,
    w2_bias: torch.Tensor | None = None,
    expert_map: torch.Tensor | None = None,
    gated: bool = True,
    apply_router_weight_on_input: bool = False,
    routed_scaling_factor: float = 1.0,
) -> torch.Tensor:
    """float64 [M, H]: for every token and choice weight · (w2 · activation(w13 · x)), one after another.

    x [M, H], w13 [E, 2I, H] ([E, I, H] and activation(h) when not gated), w2 [E, H, I], topk_ids and
    topk_weights [M, T], biases [E, 2I] and [E, H] in the order of the columns. An id of −1, or one that
    `expert_map` sends to −1, adds nothing.
    """
    out = torch.zeros(x.shape[0], w2.shape[1], dtype=torch.float64)
    for token in range(x.shape[0]):
        for choice in range(topk_ids.shape[1]):
            expert = int(topk_ids[token, choice])
            if expert >= 0 and expert_map is not None:
                expert = int(expert_map[expert])
            if expert < 0:
                continue
            weight = topk_weights[token, choice].double()
            row = x[token].double() * weight if apply_router_weight_on_input else x[token].double()
            hidden = w13[expert].double() @ row
            if w13_bias is not None:
                hidden = hidden + w13_bias[expert].double()
            hidden = activation(*hidden.chunk(2)) if gated else activation(hidden)
            y = w2[expert].double() @ hidden
            if w2_bias is not None:
                y = y + w2_bias[expert].double()
            out[token] += y if apply_router_weight_on_input else weight * y
    return out * routed_scaling_factor
