"""The prefill path's plan: tiles, variants, shared memory and buffers, without a GPU."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from marlin_moe.kernels.backends.prefill import specs
from marlin_moe.kernels.errors import WorkspaceError
from marlin_moe.kernels.plan.prefill import (
    MOST_EXPERTS,
    RESERVED_BYTES,
    SMEM_BYTES,
    TILE_SHAPES,
    choose_tile,
    choose_variant,
    plan_workspace,
    reason_against,
    variants,
)
from marlin_moe.kernels.plan.problem import LayerFacts, MatrixFacts, MoEProblem

W13 = MatrixFacts(
    size_k=7168, size_n=4096, bits=4, num_groups=224, zero_points=False, sort_order=False, bias=False
)
W2 = MatrixFacts(
    size_k=2048, size_n=7168, bits=8, num_groups=1, zero_points=True, sort_order=False, bias=False
)
FACTS = LayerFacts(
    num_experts=48, num_global_experts=384, gated=True, w13=W13, w2=W2, scales_dtype=torch.bfloat16
)
PROBLEM = MoEProblem(layer=FACTS, tokens=512, top_k=8, x_dtype=torch.bfloat16, device_type="cuda")


def test_widths_are_octets_up_to_the_tile() -> None:
    for tile in TILE_SHAPES:
        assert tile.widths == tuple(sorted(tile.widths))
        assert tile.widths[-1] == tile.rows
        assert all(width % 8 == 0 for width in tile.widths)
        assert [8 * bit for bit in range(32) if tile.mask >> bit & 1] == list(tile.widths)
    assert [tile.rows for tile in TILE_SHAPES] == sorted(tile.rows for tile in TILE_SHAPES)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("groups", [1, 56, 112, 224])
@pytest.mark.parametrize("zero_points", [False, True])
def test_shared_memory_of_all_blocks_of_a_multiprocessor_fits(
    bits: int, groups: int, zero_points: bool
) -> None:
    w13 = replace(W13, bits=bits, num_groups=groups, zero_points=zero_points)
    for found in variants(replace(FACTS, w13=w13)):
        for gemm in (found.first, found.second):
            blocks = gemm.tile.blocks_per_sm
            assert blocks * (gemm.smem_bytes + RESERVED_BYTES) <= SMEM_BYTES + RESERVED_BYTES, gemm.label
            assert gemm.stages >= 3, gemm.label


def test_each_gemm_has_the_format_of_its_matrix() -> None:
    found = choose_variant(FACTS, rows=4096)
    assert found.first.label == "prefill 1 bf16 w4g32 tile 32"
    assert found.second.label == "prefill 2 bf16 w8g0z tile 32"
    assert found.first.constants["STAGES"] == found.first.stages
    fp16 = choose_variant(replace(FACTS, scales_dtype=torch.float16), rows=4096)
    assert fp16.first.label == "prefill 1 fp16 w4g32 tile 32"


FASTEST = {
    1: 32,
    5: 32,
    16: 32,
    21: 32,
    32: 64,
    43: 64,
    64: 104,
    85: 104,
    128: 144,
    171: 104,
    256: 144,
    512: 144,
}


@pytest.mark.parametrize("share", [*FASTEST, 2048, 10**9])
def test_tiles_are_those_that_were_fastest(share: int) -> None:
    """Measured on an H200: `benchmarks/notes.md`."""
    assert choose_tile(share).rows == FASTEST.get(share, 144)


def test_no_share_costs_much_more_than_its_neighbour() -> None:
    costs = [choose_tile(share).cost(share) for share in range(1, 3000)]
    for share, (cost, following) in enumerate(pairwise(costs), start=1):
        assert following <= cost * 1.75, share
        assert cost <= following * 1.5, share


def test_what_can_be_chosen_is_built_ahead() -> None:
    built = {spec.label for spec in specs([FACTS])}
    for rows in (1, 1000, 10_000, 100_000, 1_000_000):
        found = choose_variant(FACTS, rows=rows)
        assert {found.first.label, found.second.label, "prefill route bf16"} <= built
    assert len(built) == 2 * len(TILE_SHAPES) + 1


def test_buffers_hold_the_tiles_of_any_routing() -> None:
    plan = plan_workspace(FACTS, rows=4096)
    shapes = {buffer.name: buffer.shape for buffer in plan.buffers}
    assert shapes["token_tiles"] == (48 + 4096 // 32, 8)
    assert shapes["activations"] == (4096, 2048)
    assert shapes["w2_output"] == (4096, 7168)
    with pytest.raises(WorkspaceError, match="at least one row, got 0"):
        plan_workspace(FACTS, rows=0)


@pytest.mark.parametrize(
    ("problem", "arch", "reason"),
    [
        (PROBLEM, "sm_90a", None),
        (PROBLEM, "sm_100a", "the device is sm_100a, and wgmma is sm_90a's"),
        (
            replace(PROBLEM, layer=replace(FACTS, w13=replace(W13, sort_order=True))),
            "sm_90a",
            "w13 has an act-order",
        ),
        (
            replace(PROBLEM, layer=replace(FACTS, num_experts=MOST_EXPERTS + 1)),
            "sm_90a",
            "the layer has 1025 experts",
        ),
        (replace(PROBLEM, x_dtype=torch.float16), "sm_90a", "the scales are bfloat16"),
        (replace(PROBLEM, device_type="cpu"), "sm_90a", "the layer is on cpu"),
    ],
)
def test_what_it_does_not_run(problem: MoEProblem, arch: str, reason: str | None) -> None:
    found = reason_against(problem, arch)
    if reason is None:
        assert found is None
    else:
        assert found is not None
        assert reason in found
