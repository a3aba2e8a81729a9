"""scales -> Marlin order, and into the dtype asked for.

The order is that of grouped scales where this rank's matrix has more than one group, else of single ones.
"""

import torch

from ..native.permute import permute_scales as permute
from ..stage import both, stage
from ..states import Context, State


@stage(
    reads=both("weight_scale"),
    writes=both("scales"),
    drops=both("weight_scale"),
    after=("gather", "order", "shard", "pad"),
)
def permute_scales(state: State, context: Context) -> State:
    """[B, N, G] -> [B, G, N], for w13 and w2."""
    dtype = context.dtype or state.facts.scales_dtype
    written = {
        f"{matrix}_scales": cast(
            permute(state[f"{matrix}_weight_scale"]), dtype, state, context, f"{matrix}_scales"
        )
        for matrix in ("w13", "w2")
    }
    return state.evolve(written, drop=both("weight_scale"))


def cast(tensor: torch.Tensor, dtype: torch.dtype, state: State, context: Context, name: str) -> torch.Tensor:
    """The tensor in another dtype; a value that the dtype cannot hold is a problem, not an infinity."""
    if tensor.dtype == dtype:
        return tensor
    out = tensor.to(dtype)
    if out.device.type != "meta":
        lost = int((~torch.isfinite(out) | ((out == 0) & (tensor != 0))).sum())
        if lost:
            context.problems.append(
                f"{state.facts.module}.{name}: expected values within the range of {dtype}, got {lost} that "
                f"overflow or vanish in experts {state.experts[0]}..{state.experts[-1]}. "
                f"Load with the source's {tensor.dtype} (dtype=None)."
            )
    return out
