"""Every backend says whether it takes a call, and why not."""

import pytest
import torch

from marlin_moe import MarlinMoEError, fused_marlin_moe
from marlin_moe.kernels.backends.choose import BACKENDS, verdicts
from marlin_moe.kernels.plan.problem import LayerFacts, MoEProblem
from random_layer import random_calls, random_layer


def problem(device_type: str) -> MoEProblem:
    facts = LayerFacts.of(random_layer())
    return MoEProblem(layer=facts, tokens=1, top_k=1, x_dtype=torch.bfloat16, device_type=device_type)


def test_every_candidate_is_listed_in_order() -> None:
    found = verdicts(problem("cpu"))
    assert [verdict.backend for verdict in found] == list(BACKENDS)
    assert [str(verdict) for verdict in found] == [
        "cuda: rejected, because the layer is on cpu",
        "reference: accepted",
    ]


def test_a_rejection_says_why() -> None:
    (rejected,) = verdicts(problem("meta"))
    assert not rejected.accepted
    assert str(rejected).startswith("reference: rejected, because it reads the routing, and a meta")


def test_the_backend_asked_for_runs() -> None:
    layer = random_layer()
    x, weights, ids = random_calls(0, 3, 2, layer)
    named = fused_marlin_moe(x, layer, weights, ids, backend="reference")
    assert torch.equal(named, fused_marlin_moe(x, layer, weights, ids))


@pytest.mark.parametrize("requested", [None, "reference"])
def test_none_accepts(requested: str | None) -> None:
    layer = random_layer().to("meta")
    x, weights, ids = (tensor.to("meta") for tensor in random_calls(0, 3, 2, layer))
    with pytest.raises(MarlinMoEError, match=r"backend: .*got none.\n  reference: rejected, because"):
        fused_marlin_moe(x, layer, weights, ids, backend=requested)
