"""The prefill path against float64, over its tiles and all formats, and its bits."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from float16_range import CASE, range_call
from marlin_moe.kernels.arguments import MoEArguments
from marlin_moe.kernels.backends.cuda_moe import run_variant
from marlin_moe.kernels.backends.prefill import build_spec, route_spec
from marlin_moe.kernels.device import architecture
from marlin_moe.kernels.jit.build import compile_all
from marlin_moe.kernels.plan import prefill as planner
from marlin_moe.kernels.plan.buffers import WorkspacePlan
from marlin_moe.kernels.plan.prefill import TILE_SHAPES, TileShape
from marlin_moe.kernels.plan.problem import LayerFacts
from marlin_moe.kernels.scratch import Lease, Scratch, StreamKey
from moe_cases import (
    CALL_FACTORS,
    FORMAT_FACTORS,
    LIMITS,
    CaseLayer,
    DenseMoE,
    MoECall,
    MoECase,
    check,
    difference,
    make_call,
    make_layer,
)
from pairwise import pairwise

FACTORS: dict[str, list[Any]] = {
    "tile": list(TILE_SHAPES),
    "tokens": [1, 61, 200, 777],
    "top_k": [1, 3, 8],
    "num_experts": [1, 5, 13],
    "hidden_size": [64, 192, 256, 512],
    "padded_intermediate_size": [64, 192, 256],
    "padding": [0, 32, 63],
    **FORMAT_FACTORS,
    **CALL_FACTORS,
    "max_tokens": [8192, 33],
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiled:
    """A case that runs with a tile of its own."""

    tile: TileShape
    case: MoECase

    def __str__(self) -> str:
        return f"tile={self.tile.rows} {self.case}"


def tiled(row: dict[str, Any], seed: int = 0) -> Tiled:
    return Tiled(
        tile=row["tile"],
        case=MoECase(**{name: value for name, value in row.items() if name != "tile"}, seed=seed),
    )


PAIRS = [
    tiled(row, seed) for seed, row in enumerate(pairwise(FACTORS, allowed=lambda row: tiled(row).case.fits))
]
MANY_ITEMS = MoECase(
    num_experts=24, hidden_size=2048, padded_intermediate_size=1024, top_k=4, tokens=3001, group_size=64
)
"""More work items than blocks, so that rings go around within a block."""


def run(case: MoECase, made: CaseLayer, call: MoECall, tile: TileShape | None = None) -> torch.Tensor:
    """The path's answer, in scratch and a result that are all NaN before, whatever the number of rows."""
    facts, rows = LayerFacts.of(made.layer), min(case.tokens, case.max_tokens) * case.top_k
    plan = WorkspacePlan.lay_out("prefill", rows=rows, buffers=planner.buffers(facts, rows=rows))
    scratch = torch.full((plan.nbytes,), 0xFF, dtype=torch.uint8, device=made.layer.device)
    lease = Lease.lay_over(Scratch(StreamKey.current(made.layer.device), scratch), plan)
    out = torch.full_like(call.x, float("nan"), memory_format=torch.contiguous_format)
    arguments = MoEArguments(
        x=call.x,
        layer=made.layer,
        topk_weights=call.weights,
        topk_ids=call.ids,
        expert_map=made.layer.expert_map,
        out=None,
        **call.options,
    )
    found = planner.choose_variant(facts, rows=rows) if tile is None else planner.variant(facts, tile=tile)
    run_variant(found, arguments, out, lease, rows=rows)
    torch.cuda.synchronize()
    return out


def answers(item: Tiled) -> tuple[MoECall, CaseLayer, torch.Tensor]:
    made = make_layer(item.case, "cuda:0")
    call = make_call(item.case, made.layer)
    return call, made, run(item.case, made, call, item.tile)


def limit_of(case: MoECase, call: MoECall, made: CaseLayer) -> float:
    """As everywhere, but for a single token: that is never the path's own, and a matter of chance.

    With few numbers to average over, float64 with rounded weights, activations and slots is up to 7e-3 off in
    bf16, the path's figure to two digits; so it may be a tenth above that.
    """
    limit = LIMITS[case.dtype]
    if case.tokens > 1:
        return limit
    want = DenseMoE(made)(call)
    return max(limit, 1.1 * difference(DenseMoE(made, rounded=case.dtype)(call).to(case.dtype), want)[0])


@pytest.fixture(scope="module")
def compiled() -> None:
    """All variants of this file, several at once."""
    if architecture(torch.device("cuda:0")) != planner.ARCHITECTURE:
        pytest.skip("wgmma is for Hopper")
    specs = [route_spec(fp16=fp16) for fp16 in (False, True)]
    for item in PAIRS:
        found = planner.variant(LayerFacts.of(make_layer(item.case).layer), tile=item.tile)
        specs += [build_spec(found.first), build_spec(found.second)]
    compile_all(specs)


@pytest.mark.gpu
@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("item", PAIRS, ids=[f"pairs-{item.case.seed}" for item in PAIRS])
def test_everything_pairwise(item: Tiled) -> None:
    call, made, got = answers(item)
    check(item.case, call, got, DenseMoE(made)(call), limit=limit_of(item.case, call, made))
    again = run(item.case, made, call, item.tile)
    assert torch.equal(got, again), f"other bits the second time: {item}"


@pytest.mark.gpu
@pytest.mark.usefixtures("compiled")
def test_float16_activations_beyond_its_range_are_infinite() -> None:
    case = range_call("cuda:0")
    case.check_infinite(run(CASE, case.made, case.call))


@pytest.mark.gpu
@pytest.mark.usefixtures("compiled")
def test_the_same_bits_whatever_the_tile() -> None:
    found = [answers(Tiled(tile=tile, case=MANY_ITEMS))[2] for tile in TILE_SHAPES for _ in range(3)]
    call, made, _ = answers(Tiled(tile=TILE_SHAPES[0], case=MANY_ITEMS))
    check(MANY_ITEMS, call, found[0], DenseMoE(made)(call))
    assert all(torch.equal(found[0], other) for other in found[1:])


@pytest.mark.gpu
@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("exponent", [-86, -40, 20, 26])
def test_scales_of_any_size_that_bf16_sums_can_hold(exponent: int) -> None:
    """bf16 fragments are scaled by 2^-32: from 2^-90 to 2^26 a scale loses nothing by that."""
    case = MoECase(num_experts=5, hidden_size=256, padded_intermediate_size=192, top_k=3, tokens=37)
    made = make_layer(case, "cuda:0")
    made.layer.w2.scales.mul_(2.0**exponent)
    call = make_call(case, made.layer)
    check(case, call, run(case, made, call), DenseMoE(made)(call))


@pytest.mark.gpu
@pytest.mark.usefixtures("compiled")
def test_scales_beyond_are_seen() -> None:
    """The sums are not finite then, rather than finite and wrong."""
    case = MoECase(num_experts=5, hidden_size=256, padded_intermediate_size=192, top_k=3, tokens=37)
    made = make_layer(case, "cuda:0")
    made.layer.w2.scales.mul_(2.0**34)
    assert not run(case, made, make_call(case, made.layer)).isfinite().any()


def test_the_pairs_have_every_tile_with_every_format() -> None:
    met = {
        (item.tile.rows, item.case.bits, item.case.group_size, item.case.symmetric, item.case.dtype)
        for item in PAIRS
    }
    for tile in TILE_SHAPES:
        for bits in (4, 8):
            assert any(row[:2] == (tile.rows, bits) for row in met)
    assert len(PAIRS) < 140


def test_a_pair_is_described_by_its_tile() -> None:
    assert str(replace(PAIRS[0], tile=TILE_SHAPES[1])).startswith("tile=48 ")
