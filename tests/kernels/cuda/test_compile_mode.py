"""torch.compile and export with the layer outside any nn.Module, as the first thing a process does."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from child import in_child
from device_work import device_work
from marlin_moe import fused_marlin_moe
from moe_cases import MoECase, large_layer, make_call, make_layer
from places import Place

CASE = MoECase(tokens=9, num_experts=5, hidden_size=128, padded_intermediate_size=64, top_k=2)
COPY_US = 100.0
"""A third of what copying the large layer's 680 MB takes on the fastest memory, more than copying x."""


def device_us(call: Callable[[], Any], repetitions: int = 20) -> float:
    """The GPU's time for a call, whatever the host does meanwhile: the least of some."""
    return min(sum(work.us for work in device_work(call)) for _ in range(repetitions))


@pytest.mark.gpu
@in_child(timeout_s=400)
def test_reduce_overhead_as_the_first_call_of_a_process() -> None:
    """No error, the right values, no second copy of the weights in memory and none made by a replay."""
    layer = large_layer(
        "cuda", num_experts=256, hidden_size=2048, padded_intermediate_size=768, max_tokens=64, top_k=8
    )
    x = torch.randn(4, 2048, device="cuda", dtype=torch.bfloat16)
    weights = torch.rand(4, 8, device="cuda")
    ids = torch.randint(256, (4, 8), device="cuda")

    @torch.compile(fullgraph=True, mode="reduce-overhead")
    def block(x: torch.Tensor) -> torch.Tensor:
        return fused_marlin_moe(x * 2, layer, weights, ids) + x

    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    held = torch.cuda.memory_reserved()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(4):  # a run without a graph, a capture, replays
        torch.compiler.cudagraph_mark_step_begin()
        got = block(x).clone()
    torch.cuda.synchronize()
    grown = torch.cuda.max_memory_reserved() - held
    assert grown < layer.nbytes // 4, f"{grown:,} bytes for a layer of {layer.nbytes:,}"
    want = fused_marlin_moe(x * 2, layer, weights, ids) + x
    torch.testing.assert_close(got, want, rtol=1e-2, atol=1e-2)

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fused_marlin_moe(x * 2, layer, weights, ids) + x
    graph.replay()

    def compiled() -> None:
        torch.compiler.cudagraph_mark_step_begin()
        block(x)

    plain_us, compiled_us = device_us(graph.replay), device_us(compiled)
    print(f"graph {plain_us:.0f} us, reduce-overhead {compiled_us:.0f} us, layer {layer.nbytes:,} bytes")
    assert compiled_us < plain_us + COPY_US


@pytest.mark.gpu
@in_child(timeout_s=400)
def test_reduce_overhead_sees_new_weights_and_new_tokens() -> None:
    made, other = make_layer(CASE, "cuda"), make_layer(replace(CASE, seed=3), "cuda")
    calls = [make_call(replace(CASE, seed=seed), made.layer) for seed in range(3)]

    @torch.compile(fullgraph=True, mode="reduce-overhead")
    def block(x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return fused_marlin_moe(x, made.layer, weights, ids)

    for layer in (made.layer, other.layer):
        made.layer.update_(layer)
        for _ in range(4):
            for call in calls:
                torch.compiler.cudagraph_mark_step_begin()
                got = block(call.x, call.weights, call.ids).clone()
                assert torch.equal(got, fused_marlin_moe(call.x, made.layer, call.weights, call.ids))


def fullgraph(device: str) -> None:
    """Compiled as the first call: without a graph break, the same bits as eager, with and without `out`."""
    made = make_layer(CASE, device)
    call = make_call(CASE, made.layer)

    @torch.compile(fullgraph=True)
    def block(x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return fused_marlin_moe(x, made.layer, weights, ids, routed_scaling_factor=2.5)

    @torch.compile(fullgraph=True)
    def block_out(x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, out: torch.Tensor) -> None:
        fused_marlin_moe(x, made.layer, weights, ids, routed_scaling_factor=2.5, out=out)

    got = block(call.x, call.weights, call.ids)
    want = fused_marlin_moe(call.x, made.layer, call.weights, call.ids, routed_scaling_factor=2.5)
    assert torch.equal(got, want)
    out = torch.full_like(want, torch.nan)
    block_out(call.x, call.weights, call.ids, out)
    assert torch.equal(out, want)
    for tokens in (1, 4, 8):  # other sizes: compiled again with a symbol for M
        part = call.first(tokens)
        torch.testing.assert_close(block(part.x, part.weights, part.ids), want[:tokens], rtol=1e-2, atol=1e-2)


@in_child(timeout_s=400)
def test_fullgraph_on_a_cpu() -> None:
    fullgraph("cpu")


@pytest.mark.gpu
@in_child(timeout_s=400)
def test_fullgraph_on_a_gpu() -> None:
    fullgraph("cuda")


class Block(torch.nn.Module):
    """A module that holds a layer as a plain attribute."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return fused_marlin_moe(x, self.layer, weights, ids)


def test_export(place: Place) -> None:
    case = place.takes(CASE)
    made = make_layer(case, place.device)
    call = make_call(case, made.layer)
    inputs = (call.x, call.weights, call.ids)
    program = torch.export.export(Block(made.layer), inputs)
    names = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    assert names == ["marlin_moe.fused_moe.default"]
    assert torch.equal(program.module()(*inputs), fused_marlin_moe(call.x, made.layer, *inputs[1:]))
