"""The op against float64 over all formats, and over everything else pairwise; one body for every backend."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch

from float16_range import range_call
from marlin_moe.kernels.backends.cuda_moe import build_specs
from marlin_moe.kernels.device import architecture
from marlin_moe.kernels.jit.build import compile_all
from marlin_moe.kernels.plan.cuda_moe import choose_general, choose_variant
from marlin_moe.kernels.plan.paths import Path
from marlin_moe.kernels.plan.problem import LayerFacts
from moe_cases import CALL_FACTORS, FORMAT_FACTORS, DenseMoE, MoECase, check, make_call, make_layer
from pairwise import missing, pairwise
from places import Place

FORMATS = [
    pytest.param(
        MoECase(bits=bits, symmetric=symmetric, group_size=group_size, dtype=dtype),
        id=f"w{bits}{'' if symmetric else 'z'} {group_size} {str(dtype).removeprefix('torch.')}",
    )
    for bits in (4, 8)
    for symmetric in (True, False)
    for group_size in (32, 64, 128, None)
    for dtype in (torch.bfloat16, torch.float16)
]

FACTORS: dict[str, list[Any]] = {
    "tokens": [1, 7, 40, 131],
    "top_k": [1, 2, 3, 4, 5, 6, 7, 8],
    "num_experts": [1, 3, 8, 13],
    "hidden_size": [64, 192, 320, 512],
    "padded_intermediate_size": [64, 192, 256],
    "padding": [0, 32, 63],
    **FORMAT_FACTORS,
    "act_order": [False, True],
    **CALL_FACTORS,
}


def allowed(row: dict[str, Any]) -> bool:
    return MoECase(**row).fits


PAIRS = [MoECase(**row, seed=seed) for seed, row in enumerate(pairwise(FACTORS, allowed=allowed))]


def sized(form: MoECase, place: Place) -> MoECase:
    """The format at the sizes of the full cross."""
    return replace(
        place.takes(form),
        num_experts=place.num_experts,
        hidden_size=place.hidden_size,
        padded_intermediate_size=place.padded_intermediate_size,
    )


def compile_for(place: Place, cases: Iterable[tuple[MoECase, tuple[int, ...]]]) -> None:
    """The variants that layers will ask for at these numbers of tokens, several at once."""
    if place.backend != "cuda":
        return
    arch = architecture(torch.device("cuda", torch.cuda.current_device()))
    variants = set()
    for case, all_tokens in cases:
        facts = LayerFacts.of(make_layer(case).layer)
        variants |= {
            choose_general(facts, rows=max(1, tokens * case.top_k))
            if place.path is Path.GENERAL
            else choose_variant(facts, rows=max(1, tokens * case.top_k), arch=arch)
            for tokens in all_tokens
        }
    compile_all(spec for variant in variants for spec in build_specs(variant, arch))


@pytest.fixture(scope="module")
def formats_compiled(place: Place) -> None:
    compile_for(place, ((sized(param.values[0], place), place.tokens) for param in FORMATS))


@pytest.fixture(scope="module")
def pairs_compiled(place: Place) -> None:
    compile_for(place, ((case, (case.tokens,)) for case in PAIRS))


@pytest.mark.usefixtures("formats_compiled")
@pytest.mark.parametrize("form", FORMATS)
def test_every_format_at_every_number_of_tokens(place: Place, form: MoECase) -> None:
    form = sized(form, place)
    made = make_layer(form, place.device)
    exact = DenseMoE(made)
    failures = []
    for tokens in place.tokens:
        case = replace(form, tokens=tokens)
        call = make_call(case, made.layer)
        try:
            check(case, call, call.run(made.layer, backend=place.backend), exact(call))
        except AssertionError as error:
            failures.append(str(error))
    assert not failures, "\n".join(failures)


@pytest.mark.usefixtures("pairs_compiled")
@pytest.mark.parametrize("case", PAIRS, ids=[f"pairs-{case.seed}" for case in PAIRS])
def test_everything_else_pairwise(place: Place, case: MoECase) -> None:
    case = place.takes(case)
    made = make_layer(case, place.device)
    call = make_call(case, made.layer)
    check(case, call, call.run(made.layer, backend=place.backend), DenseMoE(made)(call))


def test_the_pairs_cover_all_that_can_meet() -> None:
    rows = [{name: getattr(case, name) for name in FACTORS} for case in PAIRS]
    impossible = [row for row in missing(FACTORS, rows) if possible(row)]
    assert not impossible, impossible
    assert len(PAIRS) < 140


def possible(row: dict[str, Any]) -> bool:
    """Whether a layer has both values: only sizes and groups can exclude each other."""
    harmless = {"group_size": None, "w2_group_size": None}
    return MoECase(**(harmless | row)).fits


def test_other_formats_are_seen(place: Place) -> None:
    """The check itself: a neighbour's weights, or another activation, are far off the limit."""
    case = place.takes(MoECase(num_experts=3, hidden_size=128, padded_intermediate_size=64, top_k=2))
    made = make_layer(case, place.device)
    call = make_call(case, made.layer)
    want = DenseMoE(make_layer(replace(case, seed=1), place.device))(call)
    with pytest.raises(AssertionError, match=r"(?s)relative error .* worst at .* case: .*num_experts=3"):
        check(case, call, call.run(made.layer, backend=place.backend), want)
    with pytest.raises(AssertionError, match="relative error"):
        check(case, call, call.run(made.layer, activation="gelu"), DenseMoE(made)(call))


@pytest.mark.parametrize("routing", ["one", "few", "holes"])
@pytest.mark.parametrize("tokens", [33, 513])
def test_uneven_routing_over_many_experts(place: Place, tokens: int, routing: str) -> None:
    case = MoECase(
        num_experts=61,
        hidden_size=64,
        padded_intermediate_size=64,
        top_k=8,
        tokens=tokens if place.device == "cuda" else tokens // 8,
        routing=routing,
    )
    case = place.takes(case)
    made = make_layer(case, place.device)
    call = make_call(case, made.layer)
    check(case, call, call.run(made.layer, backend=place.backend), DenseMoE(made)(call))


@pytest.mark.parametrize("num_experts", [160, 300])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_many_experts_with_few_rows_each(
    place: Place, num_experts: int, bits: int, symmetric: bool, dtype: torch.dtype
) -> None:
    """More slots than the decode path takes, and still small tiles."""
    case = MoECase(
        num_experts=num_experts if place.device == "cuda" else num_experts // 20,
        hidden_size=128,
        padded_intermediate_size=64,
        top_k=8,
        tokens=300 if place.device == "cuda" else 15,
        bits=bits,
        symmetric=symmetric,
        dtype=dtype,
    )
    case = place.takes(case)
    made = make_layer(case, place.device)
    call = make_call(case, made.layer)
    check(case, call, call.run(made.layer, backend=place.backend), DenseMoE(made)(call))


@pytest.mark.parametrize("max_tokens", [1, 5, 32, 33])
def test_more_tokens_than_a_pass_takes(place: Place, max_tokens: int) -> None:
    case = MoECase(tokens=33, hidden_size=128, padded_intermediate_size=64, max_tokens=max_tokens)
    case = place.takes(case)
    made = make_layer(case, place.device)
    call = make_call(case, made.layer)
    check(case, call, call.run(made.layer, backend=place.backend), DenseMoE(made)(call))


@pytest.mark.filterwarnings(
    "ignore:overflow encountered in cast:RuntimeWarning",  # NumPy's, in Triton's interpreter
    "ignore:invalid value encountered:RuntimeWarning",
)
def test_float16_activations_beyond_its_range_are_seen(place: Place) -> None:
    """Kept in float32 by the reference; infinite on 16 bits, where nothing is clipped to a wrong number."""
    case = range_call(place.device)
    got = case.call.run(case.made.layer, backend=place.backend)
    if place.backend == "reference":
        case.check_kept(got)
    else:
        case.check_infinite(got)


def test_ids_out_of_range_add_nothing_on_a_gpu(place: Place) -> None:
    """On a CPU they are an error; looking at values on a GPU would wait for it."""
    if place.device == "cpu":
        pytest.skip("a CPU refuses them: tests/kernels/test_arguments.py")
    case = MoECase(tokens=9, hidden_size=128, padded_intermediate_size=64, num_experts=5)
    case = place.takes(case)
    made = make_layer(case, place.device)
    call = make_call(case, made.layer)
    wild = call.ids.clone()
    wild[0, 0], wild[1, 1], wild[2, 2], wild[3, 3] = 5, -2, 2**40, -(2**40)
    inside = replace(call, ids=wild.where((wild >= 0) & (wild < 5), -1))
    got = replace(call, ids=wild).run(made.layer, backend=place.backend)
    check(case, call, got, DenseMoE(made)(inside))
    assert torch.equal(got, inside.run(made.layer, backend=place.backend))
