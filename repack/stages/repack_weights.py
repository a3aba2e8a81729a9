"""packed words -> Marlin tiles, written straight into the destination where there is one.

The drawing is in `kernels/layout.py`; on a CPU the C loop of `native` makes the same bytes.
"""

from ..native.repack_weights import repack_weights as repack
from ..stage import both, stage
from ..states import Context, State


@stage(
    reads=both("weight_packed"),
    writes=both("qweight"),
    drops=both("weight_packed"),
    after=("gather", "order", "shard", "pad"),
)
def repack_weights(state: State, context: Context) -> State:
    """int32 [B, N, K*bits/32] -> int32 [B, K/16, N*bits/2], for w13 and w2."""
    facts = state.facts
    written = {
        f"{matrix}_qweight": repack(
            state[f"{matrix}_weight_packed"], bits=bits, out=context.destination.get(f"{matrix}_qweight")
        )
        for matrix, bits in (("w13", facts.w13.bits), ("w2", facts.w2.bits))
    }
    return state.evolve(written, drop=both("weight_packed"))
