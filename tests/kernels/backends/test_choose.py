"""Every backend says whether it takes a call, and why not."""

from dataclasses import replace

import pytest
import torch

from marlin_moe import MarlinMoEError, fused_marlin_moe
from marlin_moe.kernels import device
from marlin_moe.kernels.backends.choose import BACKENDS, choose_backend, verdicts
from marlin_moe.kernels.plan.problem import LayerFacts, MoEProblem
from random_layer import random_calls, random_layer


def problem(device_type: str) -> MoEProblem:
    facts = LayerFacts.of(random_layer())
    return MoEProblem(layer=facts, tokens=1, top_k=1, x_dtype=torch.bfloat16, device_type=device_type)


def bfloat16_on_a_gpu() -> MoEProblem:
    wanted = problem("cuda")
    return replace(wanted, layer=replace(wanted.layer, scales_dtype=torch.bfloat16))


def test_every_candidate_is_listed_in_order() -> None:
    found = verdicts(problem("cpu"))
    assert [verdict.backend for verdict in found] == list(BACKENDS)
    assert [str(verdict) for verdict in found] == [
        "cuda: rejected, because the layer is on cpu",
        "triton: rejected, because the layer is on cpu, and its kernels need a GPU (or TRITON_INTERPRET=1)",
        "reference: accepted",
    ]


def test_a_rejection_says_why() -> None:
    on_cuda, on_triton, rejected = verdicts(problem("meta"))
    assert str(on_triton).startswith("triton: rejected, because the layer is on meta")
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


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU with Triton, and without what the CUDA backend compiles with."""
    for variable in ("TRITON_INTERPRET", "MARLIN_MOE_JIT"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(device, "has_compiler", lambda: False)
    monkeypatch.setattr(device, "has_triton", lambda: True)
    monkeypatch.setattr(device, "has_c_compiler", lambda: True)


def reason_of_triton(wanted: MoEProblem) -> str | None:
    return next(verdict.reason for verdict in verdicts(wanted) if verdict.backend == "triton")


@pytest.mark.usefixtures("gpu")
def test_triton_runs_what_the_cuda_backend_rejects(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = bfloat16_on_a_gpu()
    assert choose_backend(wanted, None) == "triton"
    with pytest.raises(MarlinMoEError, match=r"(?s)cuda: rejected, .*marlin-moe\[cuda\].*triton: accepted"):
        choose_backend(wanted, "cuda")
    monkeypatch.setattr(device, "has_compiler", lambda: True)
    assert choose_backend(wanted, None) == "cuda"
    assert choose_backend(wanted, "triton") == "triton"
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert "built for ROCm" in str(verdicts(wanted)[0])
    assert choose_backend(wanted, None) == "triton"


@pytest.mark.usefixtures("gpu")
def test_triton_says_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = bfloat16_on_a_gpu()
    assert reason_of_triton(wanted) is None
    assert "load the layer with dtype=torch.float16" in str(
        reason_of_triton(replace(wanted, x_dtype=torch.float16))
    )
    assert "tensor cores" in str(reason_of_triton(replace(wanted, x_dtype=torch.float32)))
    for name, value, said in (
        ("has_c_compiler", lambda: False, "C compiler"),
        ("has_triton", lambda: False, "marlin-moe[triton]"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(device, name, value)
            assert said in str(reason_of_triton(wanted))
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "get_device_capability", lambda device=None: (7, 5))
        assert "8.0" in str(reason_of_triton(wanted))
    with monkeypatch.context() as patch:
        patch.setenv("MARLIN_MOE_JIT", "forbid")
        assert "MARLIN_MOE_JIT=forbid" in str(reason_of_triton(wanted))
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: False)
        assert reason_of_triton(wanted) == "torch finds no GPU"
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert "interpreter has no bfloat16" in str(reason_of_triton(replace(wanted, device_type="cpu")))


@pytest.mark.parametrize("requested", [None, "reference", "cuda", "triton"])
def test_none_accepts(requested: str | None) -> None:
    message = (
        r"(?s)backend: .*got none.\n  cuda: rejected, .*\n  triton: rejected, .*"
        r"\n  reference: rejected, because"
    )
    with pytest.raises(MarlinMoEError, match=message):
        choose_backend(problem("meta"), requested)


def test_meta_tensors_pass_as_a_tracer_wants_it() -> None:
    layer = random_layer().to("meta")
    x, weights, ids = (tensor.to("meta") for tensor in random_calls(0, 3, 2, layer))
    result = fused_marlin_moe(x, layer, weights, ids)
    assert (result.device.type, result.shape, result.dtype) == ("meta", x.shape, x.dtype)
