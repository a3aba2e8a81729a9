"""The prefill path's plan: tiles, variants, shared memory and buffers, without a GPU."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from marlin_moe.kernels.backends.cuda_moe import specs
from marlin_moe.kernels.plan.paths import Path, row_ranges
from marlin_moe.kernels.plan.prefill import (
    MOST_EXPERTS,
    RESERVED_BYTES,
    SETTLED_SHARE,
    SMEM_BYTES,
    TILE_SHAPES,
    buffers,
    choose_tile,
    choose_variant,
    column_tiles,
    most_tokens,
    reason_against,
    tiles_between,
    variants,
)
from marlin_moe.kernels.plan.problem import LayerFacts, MatrixFacts

W13 = MatrixFacts(
    size_k=7168, size_n=4096, bits=4, num_groups=224, zero_points=False, sort_order=False, bias=False
)
W2 = MatrixFacts(
    size_k=2048, size_n=7168, bits=8, num_groups=1, zero_points=True, sort_order=False, bias=False
)
FACTS = LayerFacts(
    num_experts=48, num_global_experts=384, gated=True, w13=W13, w2=W2, scales_dtype=torch.bfloat16
)


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
    32: 48,
    43: 64,
    64: 80,
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


def test_many_rows_of_an_expert_take_the_widest_tile() -> None:
    shares = (*range(3600, SETTLED_SHARE + 1), *(round(SETTLED_SHARE * 1.001**i) for i in range(13_000)))
    assert shares[-1] > 2**30
    assert {choose_tile(share).rows for share in shares} == {144}


@pytest.mark.parametrize(
    ("least", "most"), [(1, 1), (1, 64), (33, 200), (120, 175), (60, 5000), (9000, 9001)]
)
def test_tiles_between_are_those_that_a_share_between_chooses(least: int, most: int) -> None:
    chosen = {choose_tile(share) for share in range(least, most + 1)}
    assert tiles_between(least, most) == tuple(tile for tile in TILE_SHAPES if tile in chosen)
    assert set(tiles_between(least, None)) >= chosen | {TILE_SHAPES[-1]}


def test_what_can_be_chosen_is_built_ahead() -> None:
    *_, last = row_ranges(FACTS, arch="sm_90a")
    assert last.path is Path.PREFILL
    least = last.first
    for most in (least - 1, least, 5000, 20_000, 100_000, None):
        built = {spec.label for spec in specs([(FACTS, most)], "sm_90a") if spec.label.startswith("prefill")}
        wanted = set()
        for rows in range(least, (10**6 if most is None else most) + 1, 97):
            found = choose_variant(FACTS, rows=rows)
            wanted |= {found.first.label, found.second.label, "prefill route bf16"}
        assert built == wanted
    assert len(built) == 2 * len(TILE_SHAPES) + 1


def test_buffers_hold_the_tiles_of_any_routing() -> None:
    shapes = {name: shape for name, _, shape in buffers(FACTS, rows=4096)}
    assert shapes["token_tiles"] == (48 + 4096 // 32, 8)
    assert shapes["activations"] == (4096, 2048)
    assert shapes["w2_output"] == (4096, 7168)


def test_column_tiles_are_of_256_columns_or_of_as_many_gates_and_ups() -> None:
    assert column_tiles(FACTS) == (16, 28)
    assert column_tiles(replace(FACTS, gated=False, w13=replace(W13, size_n=2048))) == (8, 28)
    narrow = replace(
        FACTS, w13=replace(W13, size_n=2 * 192), w2=replace(W2, size_k=192), scales_dtype=torch.float16
    )
    assert column_tiles(narrow) == (2, 28)


@pytest.mark.parametrize("row_bytes", [128, 14336, 2**20, 2**31, 2**32 - 16, 2**32, 2**40])
def test_offsets_into_x_have_32_bits(row_bytes: int) -> None:
    """The kernel's own: the last row's, and in it the last of eight pieces of 16 bytes."""
    most = most_tokens(row_bytes)
    assert most == 1 or (most - 1) * row_bytes + 7 * 16 < 2**32
    assert most * row_bytes + 7 * 16 >= 2**32
    assert most_tokens(0) > 2**31


@pytest.mark.parametrize(
    ("facts", "arch", "reason"),
    [
        (FACTS, "sm_90a", None),
        (FACTS, "sm_100a", "the device is sm_100a, and wgmma is sm_90a's"),
        (replace(FACTS, w13=replace(W13, sort_order=True)), "sm_90a", "w13 has an act-order"),
        (replace(FACTS, num_experts=MOST_EXPERTS + 1), "sm_90a", "the layer has 1025 experts"),
    ],
)
def test_what_it_does_not_run(facts: LayerFacts, arch: str, reason: str | None) -> None:
    found = reason_against(facts, arch)
    if reason is None:
        assert found is None
    else:
        assert found is not None
        assert reason in found
