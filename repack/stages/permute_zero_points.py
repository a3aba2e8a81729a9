"""compressed-tensors zero points (packed along N, not interleaved) -> Marlin zero points."""

from ..native.permute import pack_zero_points
from ..stage import both, stage
from ..states import Context, State


@stage(
    reads_optional=both("weight_zero_point"),
    writes_optional=both("zero_points"),
    drops=both("weight_zero_point"),
    after=("gather", "order", "shard", "pad"),
)
def permute_zero_points(state: State, context: Context) -> State:
    """int32 [B, N*bits/32, G] -> int32 [B, G, N*bits/32], where the matrix is asymmetric."""
    written = {
        f"{matrix}_zero_points": pack_zero_points(zeros, bits=bits)
        for matrix, bits in (("w13", state.facts.w13.bits), ("w2", state.facts.w2.bits))
        if (zeros := state.get(f"{matrix}_weight_zero_point")) is not None
    }
    return state.evolve(written, drop=both("weight_zero_point"))
