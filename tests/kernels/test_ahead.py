"""`reserve` compiles on a CUDA device what its layers can ask for, and only there."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from checkpoints import write_checkpoint
from marlin_moe import reserve
from marlin_moe.kernels import ahead, device, workspace
from marlin_moe.kernels.backends import cuda_moe, prefill
from marlin_moe.kernels.jit.spec import BuildSpec
from marlin_moe.kernels.plan import cuda_moe as planner
from marlin_moe.kernels.plan.cuda_moe import Variant
from marlin_moe.kernels.plan.decode import DecodeVariant
from marlin_moe.kernels.plan.prefill import PrefillVariant
from marlin_moe.kernels.plan.problem import LayerFacts
from marlin_moe.kernels.plan.variant import MoEVariant
from marlin_moe.kernels.plan.workspaces import usual_backend
from marlin_moe.kernels.workspace import Workspace
from marlin_moe.repack import build_kernels as build_kernels_module
from marlin_moe.repack.build_kernels import build_kernels, layer_facts
from marlin_moe.repack.rank_facts import all_ranks
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
    monkeypatch.setattr(cuda_moe, "compile_all", lambda specs: calls.append(list(specs)))
    monkeypatch.setattr(cuda_moe, "load_ahead", lambda *arguments: calls.append(arguments))
    return calls


def facts(**changes: Any) -> LayerFacts:
    return LayerFacts.of(random_layer(**changes))


def specs_of(variants: Iterable[Variant], arch: str = "sm_90a") -> set[BuildSpec]:
    return {spec for variant in variants for spec in cuda_moe.build_specs(variant, arch)}


def test_equal_layers_are_compiled_once(asked: list[Any]) -> None:
    one, other = facts(num_experts=3), facts(num_experts=3, bits=8)
    ahead.compile_for([(one, 1), (other, 2**20), (one, 2**20)], CUDA)
    variants = {*planner.variants(one, "sm_90a"), *planner.variants(other, "sm_90a")}
    compiled, *loaded = asked
    assert len(compiled) == len(set(compiled)), "a route kernel is shared"
    assert set(compiled) == specs_of(variants)
    assert {spec.source.name for spec in compiled} == {
        *("decode.cu", "moe.cu", "prefill_gemm.cu", "prefill_route.cu")
    }
    assert len(loaded) == len(variants)
    assert set(loaded) == {(variant, 3, CUDA) for variant in variants}


def test_where_compiling_is_forbidden_the_cache_must_have_it(
    asked: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MARLIN_MOE_JIT", "forbid")
    one = facts(num_experts=7)
    ahead.compile_for([(one, 2**20)], CUDA)
    assert asked == [(variant, 7, CUDA) for variant in planner.variants(one, "sm_90a")]


def test_every_variant_is_loaded_by_its_path(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[Any] = []
    for module in (cuda_moe, prefill):
        monkeypatch.setattr(module, "prepared", lambda variant, *_: loaded.append(variant))
    variants = planner.variants(facts(num_experts=3), "sm_90a")
    assert {type(variant) for variant in variants} == {DecodeVariant, MoEVariant, PrefillVariant}
    for variant in variants:
        cuda_moe.load_ahead(variant, 5, CUDA)
    assert tuple(loaded) == variants


@pytest.mark.parametrize("max_tokens", [1, 20, 70, 300, 8192])
def test_what_build_makes_is_what_reserve_asks_for(
    tmp_path: Path, asked: list[Any], monkeypatch: pytest.MonkeyPatch, max_tokens: int
) -> None:
    """No more, so that a process that may not compile gets no error for a kernel that no call can choose."""
    for needs_a_stream in ("_check_room", "_bind"):
        monkeypatch.setattr(Workspace, needs_a_stream, Mock())
    write_checkpoint(tmp_path, num_layers=2, num_experts=4, symmetric=False)
    ((loaded, *_), _) = layer_facts(tmp_path)
    (rank,) = all_ranks(loaded, tp=1, ep=1)
    monkeypatch.setattr(
        build_kernels_module, "compile_all", lambda specs, must_store: asked.append(list(specs)) or []
    )
    build_kernels(tmp_path, ["sm_90a"], max_tokens=max_tokens, top_k=2)
    sources = ("moe.cu", "decode.cu", "prefill_gemm.cu", "prefill_route.cu")
    made = {spec for spec in asked.pop() if spec.source.name in sources}
    monkeypatch.setenv("MARLIN_MOE_JIT", "forbid")
    workspace = Workspace(rank, device=CUDA, max_tokens=max_tokens, top_k=2)
    workspace.reserve()
    assert specs_of(variant for variant, *_ in asked) == made
    choices = {
        planner.choose_variant(rank, rows=rows, arch="sm_90a") for rows in range(1, 2 * max_tokens + 1)
    }
    assert {variant for variant, *_ in asked} == choices


def test_nothing_is_compiled_where_the_backend_does_not_run(
    asked: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    ahead.compile_for([], CUDA)
    ahead.compile_for([(facts(), 1)], torch.device("cpu"))
    monkeypatch.setattr(device, "has_compiler", lambda: False)
    ahead.compile_for([(facts(), 1)], CUDA)
    monkeypatch.setattr(device, "has_compiler", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    ahead.compile_for([(facts(), 1)], CUDA)
    assert asked == []


def test_a_device_gets_the_scratch_of_the_backend_that_runs_there(
    asked: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = LayerFacts.of(random_layer(dtype=torch.bfloat16))
    assert usual_backend(layer, CUDA) == "cuda"
    assert usual_backend(layer, torch.device("cpu")) == "reference"
    monkeypatch.setattr(device, "has_compiler", lambda: False)
    monkeypatch.setattr(device, "has_triton", lambda: True)
    monkeypatch.setattr(device, "has_c_compiler", lambda: True)
    assert usual_backend(layer, CUDA) == "triton"
    assert usual_backend(facts(dtype=torch.float32), CUDA) == "reference"
    monkeypatch.setattr(device, "has_triton", lambda: False)
    assert usual_backend(layer, CUDA) == "reference"
    monkeypatch.setattr(device, "has_compiler", lambda: True)
    monkeypatch.setattr(device, "has_triton", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert usual_backend(layer, CUDA) == "reference"


def test_the_interpreter_runs_on_a_cpu_without_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "has_triton", lambda: True)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    found = [
        usual_backend(facts(dtype=dtype), torch.device("cpu"))
        for dtype in (torch.float32, torch.float16, torch.bfloat16)
    ]
    assert found == ["triton", "triton", "reference"]


def test_reserving_asks_for_the_layers_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(workspace, "compile_for", lambda needs, device: calls.append((set(needs), device)))
    layer, other = random_layer(max_tokens=16), random_layer(bits=8, max_tokens=128, top_k=3)
    assert layer.workspace is not None
    assert other.workspace is not None
    layer.workspace.reserve(top_k=2)
    assert calls == [({(layer.workspace.facts, 16 * 2)}, torch.device("cpu"))]
    reserve("cpu", max_tokens=8, top_k=4)
    assert calls[1][0] >= {(layer.workspace.facts, 16 * 4), (other.workspace.facts, 128 * 3)}
