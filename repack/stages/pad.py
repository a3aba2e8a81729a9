"""I up to a multiple of 64, each half of w13 alone; what is added is 0.

    I = 96, Ip = 128        w13 [gate 0..95, 0 x 32; up 0..95, 0 x 32]      w2 rows 0..95, 0 x 32

Padded columns of w13 have scale 0, so their activations are exactly 0 and what stands in w2's padded rows
cannot matter: where w2 has one scale per column, that scale stays as it is.
"""

from dataclasses import replace

import torch

from ...kernels.layout import TILE_N
from ..stage import both, stage
from ..states import Context, State


@stage(
    reads=both("weight_packed", "weight_scale"),
    reads_optional=both("weight_zero_point", "weight_bias"),
    writes=both("weight_packed", "weight_scale"),
    writes_optional=both("weight_zero_point", "weight_bias"),
    after=("shard",),
)
def pad(state: State, context: Context) -> State:
    """Extend the intermediate size with zeros to whole Marlin tiles."""
    facts = state.facts
    padded = -(-facts.intermediate_size // TILE_N) * TILE_N
    if padded == facts.padded_intermediate_size:
        return state
    written = {}
    rows = {"weight_packed": padded, "weight_scale": padded, "weight_bias": padded}
    rows["weight_zero_point"] = padded * facts.w13.bits // 32
    for name, length in rows.items():
        tensor = state.get(f"w13_{name}")  # [B, R*length, …]
        if tensor is not None:
            halves = tensor.unflatten(1, (facts.halves, -1))
            written[f"w13_{name}"] = extend(halves, 2, length).flatten(1, 2)
    written["w2_weight_packed"] = extend(state["w2_weight_packed"], 2, padded * facts.w2.bits // 32)
    if facts.w2.group_size is not None:
        for name in ("w2_weight_scale", "w2_weight_zero_point"):
            if (tensor := state.get(name)) is not None:
                written[name] = extend(tensor, 2, padded // facts.w2.group_size)
    return state.evolve(written, facts=replace(facts, padded_intermediate_size=padded))


def extend(tensor: torch.Tensor, dim: int, length: int) -> torch.Tensor:
    """A tensor of `length` along `dim`: the given one, then zeros."""
    shape = list(tensor.shape)
    shape[dim] = length
    out = torch.zeros(shape, dtype=tensor.dtype, device=tensor.device)
    out.narrow(dim, 0, tensor.shape[dim]).copy_(tensor)
    return out
