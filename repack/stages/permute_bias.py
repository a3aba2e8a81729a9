"""bias -> Marlin order (that of scales with one group), in the scales' dtype."""

from ...kernels.layout import permute_bias as permute
from ..stage import both, stage
from ..states import Context, State
from .permute_scales import cast


@stage(
    reads_optional=both("weight_bias"),
    writes_optional=both("bias"),
    drops=both("weight_bias"),
    after=("gather", "order", "shard", "pad"),
)
def permute_bias(state: State, context: Context) -> State:
    """[B, N] -> [B, N], where the projections have a bias."""
    dtype = context.dtype or state.facts.scales_dtype
    written = {
        f"{matrix}_bias": cast(permute(bias), dtype, state, context, f"{matrix}_bias")
        for matrix in ("w13", "w2")
        if (bias := state.get(f"{matrix}_weight_bias")) is not None
    }
    return state.evolve(written, drop=both("weight_bias"))
