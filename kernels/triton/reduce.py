"""One row per slot to one row per token: slots that reach an expert of this rank, added in their order."""

import triton
import triton.language as tl

from .route import expert_of


@triton.jit(do_not_specialize_on_alignment=["topk_ids", "expert_map"])
def add_slots(
    w2_output,
    topk_ids,
    expert_map,
    out,
    out_stride,
    routed_scaling_factor,
    TOP_K: tl.constexpr,
    SIZE_N: tl.constexpr,
    NUM_GLOBAL: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out [M, H] = routed_scaling_factor * the sum of each token's slots, in float32. Grid [M, H / BLOCK]."""
    token = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < SIZE_N
    total = tl.zeros((BLOCK,), tl.float32)
    for k in range(TOP_K):
        slot = token * TOP_K + k
        expert = expert_of(topk_ids, expert_map, slot, True, NUM_GLOBAL, NUM_EXPERTS)
        row = w2_output + slot.to(tl.int64) * SIZE_N
        total += tl.load(row + column, mask=inside & (expert >= 0), other=0.0).to(tl.float32)
    place = out + token.to(tl.int64) * out_stride + column
    tl.store(place, (total * routed_scaling_factor).to(out.dtype.element_ty), mask=inside)
