"""The choice between decode, general and prefill: one range of rows each, and where the borders are."""

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch

from marlin_moe.kernels.plan import cuda_moe, decode, prefill
from marlin_moe.kernels.plan.decode import DecodeVariant
from marlin_moe.kernels.plan.estimate import active_experts, decode_ns, prefill_ns, token_tiles
from marlin_moe.kernels.plan.paths import LEAST_ITEMS, Path, choose_path, row_ranges
from marlin_moe.kernels.plan.prefill import PrefillVariant
from marlin_moe.kernels.plan.problem import LayerFacts, MatrixFacts
from marlin_moe.kernels.plan.variant import MoEVariant
from places import force_path

OF_PATH = {Path.DECODE: DecodeVariant, Path.GENERAL: MoEVariant, Path.PREFILL: PrefillVariant}
MOST = 9000


def layer(
    num_experts: int, num_global_experts: int, hidden: int, intermediate: int, group: int
) -> LayerFacts:
    def matrix(size_k: int, size_n: int) -> MatrixFacts:
        return MatrixFacts(
            size_k=size_k,
            size_n=size_n,
            bits=4,
            num_groups=size_k // group,
            zero_points=False,
            sort_order=False,
            bias=False,
        )

    return LayerFacts(
        num_experts=num_experts,
        num_global_experts=num_global_experts,
        gated=True,
        w13=matrix(hidden, 2 * intermediate),
        w2=matrix(intermediate, hidden),
        scales_dtype=torch.bfloat16,
    )


LAYERS = {
    "kimi tp8": layer(384, 384, 7168, 256, 32),
    "kimi ep8": layer(48, 384, 7168, 2048, 32),
    "qwen3": layer(128, 128, 2048, 768, 128),
    "mixtral": layer(8, 8, 4096, 14336, 128),
    "deepseek tp8": layer(256, 256, 7168, 256, 128),
    "tiny": layer(3, 3, 128, 64, 32),
    "one expert": layer(1, 1, 128, 64, 32),
    "one expert of many": layer(1, 40, 64, 64, 32),
    "wide": layer(2, 2, 2**16, 2**15, 128),
    "many experts": layer(1500, 1500, 256, 64, 32),
}
LAYERS["act-order"] = replace(LAYERS["tiny"], w13=replace(LAYERS["tiny"].w13, sort_order=True))
ARCHS = ("sm_80", "sm_90a", "sm_100a")
ALL = pytest.mark.parametrize(
    ("facts", "arch"),
    [pytest.param(facts, arch, id=f"{name} {arch}") for name, facts in LAYERS.items() for arch in ARCHS],
)


@ALL
def test_each_path_has_one_range_of_rows(facts: LayerFacts, arch: str) -> None:
    chosen = [choose_path(facts, rows=rows, arch=arch) for rows in range(1, MOST)]
    met = [path for path, _ in itertools.groupby(chosen)]
    assert met == [path for path in Path if path in met], "in this order, each once"
    ranges = row_ranges(facts, arch=arch)
    assert [part.path for part in ranges] == met
    assert ranges[0].first == 1
    assert ranges[-1].last is None
    for part, following in itertools.pairwise(ranges):
        assert part.last == following.first - 1
        assert chosen[part.last - 1] is part.path
        assert chosen[part.last] is following.path
    assert choose_path(facts, rows=2**40, arch=arch) is met[-1]


@ALL
def test_a_path_is_chosen_where_it_runs(facts: LayerFacts, arch: str) -> None:
    for part in row_ranges(facts, arch=arch):
        if part.path is Path.DECODE:
            assert part.last is not None
            assert part.last <= decode.max_rows(facts)
        if part.path is Path.PREFILL:
            assert prefill.reason_against(facts, arch) is None


@ALL
def test_up_to_some_rows_the_ranges_end_there(facts: LayerFacts, arch: str) -> None:
    for most in (1, 7, 63, 64, 65, 128, 200, 2048, 2049, 10**6):
        ranges = row_ranges(facts, arch=arch, most=most)
        assert ranges[-1].last == most
        assert all(part.last is not None and part.first <= part.last for part in ranges)
        for rows in {1, max(1, most // 2), most}:
            (holding,) = (part.path for part in ranges if part.holds(rows))
            assert holding is choose_path(facts, rows=rows, arch=arch)


@ALL
def test_what_can_be_chosen_is_what_is_chosen(facts: LayerFacts, arch: str) -> None:
    chosen = [cuda_moe.choose_variant(facts, rows=rows, arch=arch) for rows in range(1, 2500)]
    for rows, variant in enumerate(chosen, start=1):
        assert isinstance(variant, OF_PATH[choose_path(facts, rows=rows, arch=arch)])
    for most in (1, 40, 64, 200, 1000, 2100, 2499):
        possible = cuda_moe.possible_variants(facts, most, arch)
        assert len(possible) == len(set(possible))
        assert set(possible) == set(chosen[:most])
    assert set(cuda_moe.variants(facts, arch)) >= set(chosen)


@ALL
def test_one_plan_has_the_buffers_of_every_path(facts: LayerFacts, arch: str) -> None:
    for most in (1, 64, 200, 5000):
        plan = cuda_moe.plan_workspace(facts, rows=most, blocks=264, arch=arch)
        have = {buffer.name: (buffer.dtype, buffer.nbytes) for buffer in plan.buffers}
        assert len(have) == len(plan.buffers)
        paths = {part.path for part in row_ranges(facts, arch=arch, most=most)}
        assert ("routed_rows" in have) == (Path.PREFILL in paths), "no more than can be used"
        for rows in {1, most // 2 or 1, most}:
            if choose_path(facts, rows=rows, arch=arch) is Path.PREFILL:
                for name, dtype, shape in prefill.buffers(facts, rows=rows):
                    assert have[name][0] is dtype
                    assert have[name][1] >= dtype.itemsize * torch.Size(shape).numel(), name


def test_the_plan_is_printed_with_all_of_it() -> None:
    text = str(cuda_moe.plan_workspace(LAYERS["qwen3"], rows=4096, blocks=264, arch="sm_90a"))
    names = [line.split()[0] for line in text.splitlines()[2:]]
    assert names == [
        *("tile_count", "sorted_slots", "slot_is_here", "tile_expert", "tile_row", "tile_rows"),
        *("activations", "w2_output", "split_sums", "counters", "routed_rows", "token_tiles"),
    ]


@pytest.mark.parametrize(
    ("name", "last", "first"),
    [("tiny", 96, 128), ("one expert", 32, 128), ("one expert of many", 1280, 5120)],
)
def test_small_layers_have_general_rows_until_the_device_is_full(name: str, last: int, first: int) -> None:
    facts = LAYERS[name]
    few, between, many = row_ranges(facts, arch="sm_90a")
    assert (few.path, between.path, many.path) == (Path.DECODE, Path.GENERAL, Path.PREFILL)
    assert few.last == decode.max_rows(facts) == last
    assert (between.first, between.last, many.first) == (last + 1, first - 1, first)
    per_row = min(prefill.column_tiles(facts)) * facts.num_experts / facts.num_global_experts
    assert per_row * first >= LEAST_ITEMS > per_row * (first - 1)


def test_what_prefill_does_not_run_is_general_behind_decode() -> None:
    assert choose_path(LAYERS["act-order"], rows=96, arch="sm_90a") is Path.DECODE
    assert choose_path(LAYERS["act-order"], rows=97, arch="sm_90a") is Path.GENERAL
    assert choose_path(LAYERS["many experts"], rows=1, arch="sm_90a") is Path.GENERAL
    assert choose_path(LAYERS["kimi tp8"], rows=2048, arch="sm_100a") is Path.DECODE
    assert choose_path(LAYERS["kimi tp8"], rows=2049, arch="sm_100a") is Path.GENERAL


@pytest.mark.parametrize(
    ("name", "last"),
    [("kimi tp8", 1536), ("kimi ep8", 1536), ("deepseek tp8", 1024), ("qwen3", 512), ("mixtral", 32)],
)
def test_decode_ends_where_prefill_is_faster(name: str, last: int) -> None:
    facts = LAYERS[name]
    first, second = row_ranges(facts, arch="sm_90a")
    assert (first.path, first.last) == (Path.DECODE, last)
    assert (second.path, second.first) == (Path.PREFILL, last + 1)
    assert row_ranges(facts, arch="sm_89")[0].last == decode.max_rows(facts)
    assert decode_ns(facts, rows=last) <= prefill_ns(facts, rows=last)
    assert decode_ns(facts, rows=last + 1) > prefill_ns(facts, rows=last + 1)


MEASURED_US: dict[Any, dict[str, dict[int, float]]] = {
    decode_ns: {
        "kimi tp8": {1: 17.0, 2: 25.3, 4: 37.2, 8: 57.6, 16: 92, 32: 153, 64: 232, 128: 308},
        "qwen3": {1: 16.5, 2: 20.4, 4: 29.4, 8: 45.3, 16: 63.8, 32: 83.5, 64: 98.1, 128: 136},
    },
    prefill_ns: {
        "kimi tp8": {256: 344, 512: 371, 1024: 417, 4096: 890},
        "qwen3": {256: 122, 512: 142, 1024: 194, 4096: 538},
        "kimi ep8": {256: 313, 512: 321, 1024: 351, 4096: 613},
    },
}
"""By M, top-8, on an H200: benchmarks/notes.md."""

PREFILL_FORMERLY_US: dict[str, dict[int, float]] = {
    "kimi tp8": {16: 136, 32: 235, 64: 333, 128: 363, 2048: 627, 8192: 1743},
    "qwen3": {16: 90, 32: 115, 64: 121, 128: 127, 2048: 316, 8192: 1043},
    "kimi ep8": {16: 129, 32: 220, 64: 312, 128: 330, 2048: 476, 8192: 1203},
}
"""Of the form before, at which the present one was not measured: elsewhere it took 0.88 to 0.99 of that."""


@pytest.mark.parametrize("estimate", MEASURED_US, ids=lambda estimate: estimate.__name__)
def test_estimates_are_near_what_was_measured(estimate: Any) -> None:
    off = {
        (name, tokens): estimate(LAYERS[name], rows=8 * tokens) / 1000 / us
        for name, measured in MEASURED_US[estimate].items()
        for tokens, us in measured.items()
    }
    assert all(1 / 1.15 < ratio < 1.15 for ratio in off.values()), off


def test_where_prefill_was_not_measured_the_estimate_is_near_its_former_form() -> None:
    off = {
        (name, tokens): prefill_ns(LAYERS[name], rows=8 * tokens) / 1000 / us
        for name, measured in PREFILL_FORMERLY_US.items()
        for tokens, us in measured.items()
    }
    assert all(0.84 < ratio < 1.1 for ratio in off.values()), off


@pytest.mark.parametrize("name", ["kimi tp8", "kimi ep8", "qwen3", "deepseek tp8"])
def test_the_prefill_estimate_has_no_cliff(name: str) -> None:
    """Neither where a round of work items begins nor where another tile is chosen."""
    rows = [round(128 * 1.02**i) for i in range(310)]
    times = [prefill_ns(LAYERS[name], rows=each) for each in rows]
    for first, (before, after) in zip(rows, itertools.pairwise(times), strict=False):
        assert 0.88 < after / before < 1.25, first


def test_active_experts_are_those_that_some_row_reaches() -> None:
    made = torch.Generator().manual_seed(0)
    for rows in (1, 8, 64, 300, 2048):
        ids = torch.randint(384, (200, rows), generator=made)
        here = torch.stack([(row[row < 48].unique().numel() * torch.ones(())) for row in ids]).mean()
        assert abs(active_experts(LAYERS["kimi ep8"], rows=rows) - max(1.0, here.item())) < 1


@pytest.mark.parametrize("name", ["tiny", "kimi ep8", "one expert", "one expert of many"])
def test_token_tiles_are_those_of_random_routing(name: str) -> None:
    facts = LAYERS[name]
    made = torch.Generator().manual_seed(0)
    few = (rows for rows in (1, 8, 32, 65, 300, 2048) if rows <= decode.max_rows(facts))
    for rows, tile in itertools.product(few, decode.TOKEN_TILES):
        ids = torch.randint(facts.num_global_experts, (2000, rows), generator=made)
        counts = torch.stack([(ids == expert).sum(1) for expert in range(facts.num_experts)])
        tiles = (-(-counts // tile)).sum(0).double()
        error = 4 * float(tiles.std()) / 2000**0.5 + 0.001
        assert abs(token_tiles(facts, rows=rows, tile=tile) - float(tiles.mean())) < error, (rows, tile)


@pytest.mark.parametrize("path", Path)
def test_tests_can_force_a_path(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    force_path(monkeypatch, path)
    for arch in ("sm_80", "sm_90a"):
        (only,) = row_ranges(LAYERS["kimi tp8"], arch=arch, most=MOST)
        assert (only.path, only.first, only.last) == (path, 1, MOST)
        assert {choose_path(LAYERS["kimi tp8"], rows=rows, arch=arch) for rows in (1, 40, 2**40)} == {path}
