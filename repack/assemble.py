"""A finished state -> `MarlinMoELayer`."""

from typing import Any

import torch

from ..kernels.layer import MarlinMoELayer, Shard
from ..kernels.matrix import MarlinMatrix, QuantFormat
from .states import Context, MatrixFacts, State


def assemble_layer(state: State, context: Context, *, recipe: Any = None) -> MarlinMoELayer:
    """The layer of a state whose fields are all in the Marlin layout."""
    facts = state.facts
    return MarlinMoELayer(
        w13=_matrix(state, "w13", facts.w13),
        w2=_matrix(state, "w2", facts.w2),
        num_global_experts=facts.num_experts,
        intermediate_size=facts.intermediate_size,
        gated=facts.gated,
        expert_map=expert_map(facts.num_experts, context.ep, context.device),
        intermediate_order=state.get("intermediate_order"),
        tp=context.tp,
        ep=context.ep,
        top_k=context.top_k,
        max_tokens=context.max_tokens,
        workspace=state.get("workspace"),
        recipe=recipe,
    )


def expert_map(num_experts: int, ep: Shard, device: torch.device) -> torch.Tensor | None:
    """int32 [num_experts]: local index of each global expert on this EP rank or -1; None when it has all."""
    if ep.size == 1:
        return None
    start, stop = ep.bounds(num_experts)
    mapped = torch.full((num_experts,), -1, dtype=torch.int32, device="cpu")
    mapped[start:stop] = torch.arange(stop - start, dtype=torch.int32, device="cpu")
    return mapped.to(device)


def matrix_format(facts: MatrixFacts, *, num_groups: int) -> QuantFormat:
    """The format of this rank's matrix: group_size is None exactly when it has one group."""
    return QuantFormat(
        bits=facts.bits, group_size=None if num_groups == 1 else facts.group_size, symmetric=facts.symmetric
    )


def _matrix(state: State, name: str, facts: MatrixFacts) -> MarlinMatrix:
    scales = state[f"{name}_scales"]
    return MarlinMatrix(
        qweight=state[f"{name}_qweight"],
        scales=scales,
        zero_points=state.get(f"{name}_zero_points"),
        sort_order=state.get(f"{name}_sort_order"),
        bias=state.get(f"{name}_bias"),
        format=matrix_format(facts, num_groups=scales.shape[1]),
    )
