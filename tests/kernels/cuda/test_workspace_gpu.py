"""The workspace on a GPU: one for all layers of a stream, nothing allocated after the first call."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from child import in_child
from marlin_moe import MarlinMoEError, MarlinMoELayer, reserve
from marlin_moe.kernels.backends import cuda_moe, prefill
from marlin_moe.kernels.device import architecture
from marlin_moe.kernels.jit import load as load_module
from marlin_moe.kernels.plan.prefill import PrefillVariant
from moe_cases import DenseMoE, MoECase, check, large_layer, make_call, make_layer

CASE = MoECase(tokens=9, num_experts=16, hidden_size=256, padded_intermediate_size=128, top_k=4)
COUNTERS = ("allocation.all.allocated", "num_device_alloc", "num_device_free", "num_alloc_retries")
TORCH_LEAVES = 2 << 20  # bytes at most that an allocation has more than was asked for
CYCLES = 100_000_000  # of the GPU's clock: some 50 ms

pytestmark = pytest.mark.gpu


def counted(call: Callable[[], Any], repetitions: int) -> dict[str, int]:
    """By how much the allocator's counters grow over the repetitions."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()
    for _ in range(repetitions):
        call()
    torch.cuda.synchronize()
    after = torch.cuda.memory_stats()
    return {name: after[name] - before[name] for name in COUNTERS}


@pytest.mark.parametrize("tokens", [1, 9, 300])
def test_nothing_is_allocated_in_calls_with_out(tokens: int) -> None:
    case = replace(CASE, tokens=tokens)
    made = make_layer(case, "cuda")
    call = make_call(case, made.layer)
    out = torch.empty_like(call.x)
    want = call.run(made.layer, out=out).clone()
    grown = counted(lambda: call.run(made.layer, out=out), 100)
    assert grown == dict.fromkeys(COUNTERS, 0)
    assert torch.equal(out, want)


@pytest.mark.parametrize("tokens", [1, 9, 300])
def test_only_the_result_is_allocated_in_repeated_calls(tokens: int) -> None:
    case = replace(CASE, tokens=tokens)
    made = make_layer(case, "cuda")
    call = make_call(case, made.layer)
    call.run(made.layer)
    assert made.layer.workspace is not None
    assert len(made.layer.workspace.calls) == 1  # from here on it is a call made ready
    kept = call.run(made.layer)
    grown = counted(lambda: call.run(made.layer), 100)
    one_each = {"allocation.all.allocated": 100}
    assert grown == dict.fromkeys(COUNTERS, 0) | one_each
    assert torch.equal(call.run(made.layer), kept)


def test_nothing_is_allocated_for_other_numbers_of_tokens() -> None:
    case = replace(CASE, tokens=64)
    made = make_layer(case, "cuda")
    call = make_call(case, made.layer)
    out = torch.empty_like(call.x)
    call.run(made.layer, out=out)
    for tokens in (1, 2, 3, 17, 63):
        part = call.first(tokens)
        part.run(made.layer, out=out[:tokens])
        assert counted(lambda part=part, n=tokens: part.run(made.layer, out=out[:n]), 3) == dict.fromkeys(
            COUNTERS, 0
        )


def test_a_thousand_layers_share_one_workspace() -> None:
    case = MoECase(
        tokens=5, num_experts=4, hidden_size=64, padded_intermediate_size=64, top_k=2, max_tokens=512
    )
    first = make_layer(case, "cuda")
    call = make_call(case, first.layer)
    want = call.run(first.layer)
    assert first.layer.workspace is not None
    scratch, nbytes = first.layer.workspace.data_ptr(), first.layer.workspace.nbytes
    layers = [first.layer.to("cpu").to("cuda") for _ in range(1000)]
    out = torch.empty_like(want)
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated()
    for layer in layers:
        call.run(layer, out=out)
        assert layer.workspace is not None
        assert layer.workspace.data_ptr() == scratch
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == held
    assert first.layer.workspace.nbytes == nbytes
    assert torch.equal(out, want)


def test_scratch_stays_out_of_a_pool_in_use() -> None:
    case = replace(CASE, max_tokens=2048)
    made = make_layer(case, "cuda")
    call = make_call(case, made.layer)
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        want = call.run(made.layer).clone()
    assert made.layer.workspace is not None
    scratch = made.layer.workspace.data_ptr()
    assert scratch is not None
    for segment in pool.snapshot():
        inside = segment["address"] <= scratch < segment["address"] + segment["total_size"]
        assert not inside, "the scratch lies in the pool, where nothing may stay"
    assert torch.equal(call.run(made.layer), want)
    assert made.layer.workspace.data_ptr() == scratch


@in_child(timeout_s=120)
def test_memory_is_free_when_the_last_layer_is_gone() -> None:
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated()
    made = make_layer(CASE, "cuda")
    call = make_call(CASE, made.layer)
    call.run(made.layer)
    torch.cuda.synchronize()
    assert made.layer.workspace is not None
    assert torch.cuda.memory_allocated() > held + made.layer.workspace.nbytes
    del made, call
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == held


@in_child(timeout_s=180)
def test_after_reserve_nothing_is_compiled_or_allocated() -> None:
    import os

    layers = [make_layer(replace(CASE, max_tokens=256, seed=seed), "cuda") for seed in range(3)]
    nbytes = reserve("cuda", max_tokens=256, top_k=4)
    calls = [make_call(replace(CASE, tokens=tokens), layers[0].layer) for tokens in (1, 9, 256)]
    outs = [torch.empty_like(call.x) for call in calls]
    os.environ["MARLIN_MOE_JIT"] = "forbid"
    loaded = set(load_module._loaded)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()
    for made in layers:
        for call, out in zip(calls, outs, strict=True):
            call.run(made.layer, out=out)
    torch.cuda.synchronize()
    after = torch.cuda.memory_stats()
    assert {name: after[name] - before[name] for name in COUNTERS} == dict.fromkeys(COUNTERS, 0)
    assert set(load_module._loaded) == loaded
    assert layers[0].layer.workspace is not None
    assert layers[0].layer.workspace.nbytes == nbytes


@in_child(timeout_s=180)
def test_reserve_of_one_layer_compiles_its_variants() -> None:
    made = make_layer(replace(CASE, max_tokens=256), "cuda")
    assert made.layer.workspace is not None
    assert cuda_moe._launch.cache_info().currsize == 0
    made.layer.workspace.reserve(top_k=4)
    planned = cuda_moe.planner.possible_variants(
        made.layer.workspace.facts, 256 * 4, architecture(made.layer.device)
    )
    of_prefill = sum(isinstance(variant, PrefillVariant) for variant in planned)
    assert prefill.prepared.cache_info().currsize == of_prefill
    assert cuda_moe._launch.cache_info().currsize == len(planned) - of_prefill > 0


def test_reset_clears_and_moves_nothing() -> None:
    made = make_layer(CASE, "cuda")
    call = make_call(CASE, made.layer)
    want = call.run(made.layer)
    workspace = made.layer.workspace
    assert workspace is not None
    assert workspace.scratch is not None
    place = workspace.data_ptr()
    workspace.scratch.fill_(0xFF)
    workspace.reset()
    torch.cuda.synchronize()
    assert not workspace.scratch.any()
    assert workspace.data_ptr() == place
    assert torch.equal(call.run(made.layer), want)


def test_reset_waits_for_all_streams() -> None:
    made = make_layer(CASE, "cuda")
    call = make_call(CASE, made.layer)
    want = call.run(made.layer)
    workspace = made.layer.workspace
    assert workspace is not None
    streams, scratches = [torch.cuda.Stream(), torch.cuda.Stream()], []
    torch.cuda.synchronize()
    for stream in streams:
        with torch.cuda.stream(stream):
            call.run(made.layer)
            torch.cuda._sleep(CYCLES)
            assert workspace.scratch is not None
            scratches.append(workspace.scratch.fill_(0xFF))  # as a kernel would that is still to come
    workspace.reset()
    assert all(stream.query() for stream in streams)
    assert torch.cuda.current_stream().query()
    assert not any(scratch.any() for scratch in scratches)
    for stream in streams:
        with torch.cuda.stream(stream):
            assert torch.equal(call.run(made.layer), want)


@in_child(timeout_s=120)
def test_reset_inside_a_capture_is_refused_and_does_it_no_harm() -> None:
    made = make_layer(CASE, "cuda")
    call = make_call(CASE, made.layer)
    want = call.run(made.layer)
    workspace = made.layer.workspace
    assert workspace is not None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call.run(made.layer)
        with pytest.raises(MarlinMoEError, match=r"workspace\.reset: expected no capture"):
            workspace.reset()
    out.fill_(torch.nan)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, want)


def test_more_tokens_than_planned_run_in_chunks_without_allocating() -> None:
    case = replace(CASE, tokens=1000, max_tokens=64)
    made = make_layer(case, "cuda")
    call = make_call(case, made.layer)
    out = torch.empty_like(call.x)
    call.run(made.layer, out=out)
    check(case, call, out, DenseMoE(made)(call))
    assert counted(lambda: call.run(made.layer, out=out), 5) == dict.fromkeys(COUNTERS, 0)


@in_child(timeout_s=120)
def test_the_plan_is_what_is_allocated() -> None:
    layer: MarlinMoELayer = large_layer(
        "cuda", num_experts=8, hidden_size=512, padded_intermediate_size=256, top_k=8, max_tokens=4096
    )
    workspace = layer.workspace
    assert workspace is not None
    assert workspace.plan is not None
    planned = workspace.plan.nbytes
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated()
    assert workspace.reserve() == planned
    assert planned <= torch.cuda.memory_allocated() - held <= planned + TORCH_LEAVES
