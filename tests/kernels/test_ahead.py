"""`reserve` compiles on a CUDA device what its layers can ask for, and only there."""

from typing import Any

import pytest
import torch

from marlin_moe import reserve
from marlin_moe.kernels import ahead, device, workspace
from marlin_moe.kernels.backends import cuda_moe
from marlin_moe.kernels.plan.problem import LayerFacts
from marlin_moe.kernels.plan.workspaces import usual_backend
from random_layer import random_layer

CUDA = torch.device("cuda", 0)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A device of compute capability 9.0 on which nothing is compiled; what it was asked for."""
    calls: list[Any] = []
    monkeypatch.delenv("MARLIN_MOE_JIT", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(device, "has_compiler", lambda: True)
    monkeypatch.setattr(cuda_moe, "compile_ahead", lambda facts, device: calls.append((list(facts), device)))
    monkeypatch.setattr(cuda_moe, "prepared", lambda *arguments: calls.append(arguments))
    return calls


def facts(**changes: Any) -> LayerFacts:
    return LayerFacts.of(random_layer(**changes))


def test_equal_layers_are_compiled_once(asked: list[Any]) -> None:
    one, other = facts(), facts(bits=8)
    ahead.compile_for([one, other, one], CUDA)
    assert asked == [([one, other], CUDA)]


def test_where_compiling_is_forbidden_the_cache_must_have_it(
    asked: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MARLIN_MOE_JIT", "forbid")
    one = facts(num_experts=7)
    ahead.compile_for([one], CUDA)
    assert asked == [(variant, 7, 1, CUDA) for variant in cuda_moe.planner.variants(one, "sm_90a")]


def test_nothing_is_compiled_where_the_backend_does_not_run(
    asked: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    ahead.compile_for([], CUDA)
    ahead.compile_for([facts()], torch.device("cpu"))
    monkeypatch.setattr(device, "has_compiler", lambda: False)
    ahead.compile_for([facts()], CUDA)
    monkeypatch.setattr(device, "has_compiler", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    ahead.compile_for([facts()], CUDA)
    assert asked == []


def test_a_device_on_which_the_kernels_do_not_run_gets_the_references_scratch(
    asked: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = LayerFacts.of(random_layer(dtype=torch.bfloat16))
    assert usual_backend(layer, CUDA) == "cuda"
    assert usual_backend(layer, torch.device("cpu")) == "reference"
    monkeypatch.setattr(device, "has_compiler", lambda: False)
    assert usual_backend(layer, CUDA) == "reference"
    monkeypatch.setattr(device, "has_compiler", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert usual_backend(layer, CUDA) == "reference"


def test_reserving_asks_for_the_layers_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(workspace, "compile_for", lambda facts, device: calls.append((set(facts), device)))
    layer, other = random_layer(), random_layer(bits=8)
    assert layer.workspace is not None
    assert other.workspace is not None
    layer.workspace.reserve(top_k=2)
    assert calls == [({layer.workspace.facts}, torch.device("cpu"))]
    reserve("cpu", max_tokens=64, top_k=2)
    assert calls[1][0] >= {layer.workspace.facts, other.workspace.facts}
