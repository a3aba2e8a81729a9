"""The same call gives the same bits, whatever the scratch and the memory around it hold."""

import pytest
import torch

from moe_cases import DenseMoE, MoECase, check, make_call, make_layer
from places import Place

CASES = {
    "decode": MoECase(tokens=3, num_experts=8, hidden_size=256, padded_intermediate_size=128),
    "prefill": MoECase(tokens=300, num_experts=8, hidden_size=256, padded_intermediate_size=128, top_k=2),
    "chunks": MoECase(tokens=50, num_experts=5, hidden_size=192, padded_intermediate_size=64, max_tokens=16),
    "large chunks": MoECase(
        tokens=200,
        num_experts=5,
        hidden_size=192,
        padded_intermediate_size=64,
        max_tokens=90,
        routing="holes",
    ),
    "one slot": MoECase(
        tokens=300, num_experts=8, hidden_size=256, padded_intermediate_size=128, top_k=1, expert_map="ranks"
    ),
    "all of it": MoECase(
        tokens=37,
        num_experts=5,
        hidden_size=256,
        padded_intermediate_size=128,
        bits=8,
        symmetric=False,
        group_size=None,
        act_order=True,
        biased=True,
        expert_map="shuffled",
        routing="holes",
        padding=32,
        dtype=torch.float16,
    ),
}
POISONS = {0xFF: "NaN, -1 as int32", 0x7F: "NaN, a large int32", 0x00: "zeros"}


@pytest.mark.parametrize("name", CASES)
def test_the_same_call_gives_the_same_bits(place: Place, name: str) -> None:
    case = place.takes(CASES[name])
    made = make_layer(case, place.device)
    call = make_call(case, made.layer)
    want = call.run(made.layer, backend=place.backend)
    check(case, call, want, DenseMoE(made)(call))
    for repetition in range(50 if place.device == "cuda" else 3):
        call.first(case.tokens // 2).run(made.layer, backend=place.backend)  # other rows in between
        got = call.run(made.layer, backend=place.backend)
        assert torch.equal(got, want), f"repetition {repetition} of {case}"


@pytest.mark.parametrize("name", CASES)
def test_poisoned_scratch_is_never_read(place: Place, name: str) -> None:
    case = place.takes(CASES[name])
    made = make_layer(case, place.device)
    call = make_call(case, made.layer)
    want = call.run(made.layer, backend=place.backend)
    workspace = made.layer.workspace
    assert workspace is not None
    for poison, meaning in POISONS.items():
        for form in ({}, {"out": torch.full_like(want, torch.nan)}):
            if workspace.scratch is None:
                pytest.fail("no scratch after the first call")
            workspace.scratch.fill_(poison)
            assert torch.equal(call.run(made.layer, **form), want), f"{meaning}: {case}"


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["decode", "prefill", "one slot"])
def test_poisoned_scratch_of_a_graph_is_never_read(name: str) -> None:
    """The graph itself poisons the memory that its pool then gives to the op."""
    case = CASES[name]
    made = make_layer(case, "cuda")
    call = make_call(case, made.layer)
    want = call.run(made.layer)
    assert made.layer.workspace is not None
    plan = made.layer.workspace.plan  # of this stream; the capture's own knows no top_k where ids are mapped
    assert plan is not None
    graph, out = torch.cuda.CUDAGraph(), torch.empty_like(want)
    with torch.cuda.graph(graph):
        poison = torch.full((plan.nbytes,), 0xFF, dtype=torch.uint8, device="cuda")
        del poison
        call.run(made.layer, out=out)
    for _ in range(3):
        out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out, want)
