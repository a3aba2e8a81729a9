"""Every backend says whether it takes a call, and why not."""

from dataclasses import replace

import pytest
import torch

from marlin_moe import MarlinMoEError, fused_marlin_moe
from marlin_moe.kernels.backends.choose import BACKENDS, choose_backend, verdicts
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
    on_cuda, rejected = verdicts(problem("meta"))
    assert not rejected.accepted
    assert str(on_cuda) == "cuda: rejected, because the layer is on meta"
    assert str(rejected).startswith("reference: rejected, because it reads the routing, and a meta")


def test_dtypes_that_do_not_fit_are_rejected_before_a_device_is_asked() -> None:
    wanted = replace(problem("cuda"), x_dtype=torch.float16)
    assert "load the layer with dtype=torch.float16" in str(verdicts(wanted)[0])


def test_the_backend_asked_for_runs() -> None:
    layer = random_layer()
    x, weights, ids = random_calls(0, 3, 2, layer)
    named = fused_marlin_moe(x, layer, weights, ids, backend="reference")
    assert torch.equal(named, fused_marlin_moe(x, layer, weights, ids))


@pytest.mark.parametrize("requested", [None, "reference", "cuda"])
def test_none_accepts(requested: str | None) -> None:
    message = r"(?s)backend: .*got none.\n  cuda: rejected, .*\n  reference: rejected, because"
    with pytest.raises(MarlinMoEError, match=message):
        choose_backend(problem("meta"), requested)


def test_meta_tensors_pass_as_a_tracer_wants_it() -> None:
    layer = random_layer().to("meta")
    x, weights, ids = (tensor.to("meta") for tensor in random_calls(0, 3, 2, layer))
    result = fused_marlin_moe(x, layer, weights, ids)
    assert (result.device.type, result.shape, result.dtype) == ("meta", x.shape, x.dtype)
