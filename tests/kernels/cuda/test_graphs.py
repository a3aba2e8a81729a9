"""CUDA graphs: captured cold, replayed at once, over new weights; nothing is allocated by a replay."""

from dataclasses import replace

import pytest
import torch

from child import in_child
from moe_cases import DenseMoE, MoECase, check, make_call, make_layer

CASE = MoECase(num_experts=16, hidden_size=256, padded_intermediate_size=128, top_k=4)

pytestmark = pytest.mark.gpu

few_and_many_rows = pytest.mark.parametrize("tokens", [9, 90])
"""On Hopper they take different paths."""


@few_and_many_rows
@in_child(timeout_s=120)
def test_captured_as_the_first_thing_that_the_process_does(tokens: int) -> None:
    """No call before, on no stream: compiling, loading and scratch all happen inside the capture."""
    case = replace(CASE, tokens=tokens)
    made = make_layer(case, "cuda")
    call = make_call(case, made.layer)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call.run(made.layer)
    exact = DenseMoE(made)
    for _ in range(3):
        out.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        check(case, call, out, exact(call))
    assert made.layer.workspace is not None
    assert made.layer.workspace.nbytes == 0  # a capture holds nothing when it is over
    assert torch.equal(call.run(made.layer), out)


@few_and_many_rows
@in_child(timeout_s=120)
def test_new_tokens_in_the_captured_tensors(tokens: int) -> None:
    case = replace(CASE, tokens=tokens)
    made = make_layer(case, "cuda")
    call, exact = make_call(case, made.layer), DenseMoE(made)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call.run(made.layer)
    for seed in range(1, 6):
        other = make_call(replace(case, seed=seed, routing="holes"), made.layer)
        for mine, theirs in ((call.x, other.x), (call.weights, other.weights), (call.ids, other.ids)):
            mine.copy_(theirs)
        graph.replay()
        check(case, call, out, exact(other))


@few_and_many_rows
@in_child(timeout_s=180)
def test_two_graphs_replayed_at_once(tokens: int) -> None:
    case = replace(CASE, tokens=tokens)
    made = make_layer(case, "cuda")
    call, exact = make_call(case, made.layer), DenseMoE(made)
    graphs, outs, wants, wrong = [], [], [], []
    for size in (tokens, tokens // 2):
        part = call.first(size)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outs.append(part.run(made.layer))
        graph.replay()
        check(case, part, outs[-1], exact(part))
        graphs.append(graph)
        wants.append(outs[-1].clone())
        wrong.append(torch.zeros((), dtype=torch.int64, device="cuda"))
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    for _ in range(2000):
        for stream, graph, out, want, count in zip(streams, graphs, outs, wants, wrong, strict=True):
            with torch.cuda.stream(stream):
                out.fill_(torch.nan)
                graph.replay()
                count.add_((out != want).any())
    torch.cuda.synchronize()
    assert [int(count) for count in wrong] == [0, 0]


@few_and_many_rows
@in_child(timeout_s=180)
def test_a_graph_and_eager_calls_at_once(tokens: int) -> None:
    case = replace(CASE, tokens=tokens)
    made = make_layer(case, "cuda")
    call = make_call(case, made.layer)
    want = call.run(made.layer)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call.run(made.layer)
    torch.cuda.synchronize()
    wrong = torch.zeros(2, dtype=torch.int64, device="cuda")
    side = torch.cuda.Stream()
    for _ in range(1000):
        with torch.cuda.stream(side):
            graph.replay()
            wrong[0].add_((out != want).any())
        wrong[1].add_((call.run(made.layer) != want).any())
    torch.cuda.synchronize()
    assert wrong.tolist() == [0, 0]


@few_and_many_rows
@in_child(timeout_s=120)
def test_new_weights_between_replays(tokens: int) -> None:
    case = replace(CASE, tokens=tokens)
    made = make_layer(case, "cuda")
    other = make_layer(replace(case, seed=7), "cuda")
    call = make_call(case, made.layer)
    before, after = call.run(made.layer), call.run(other.layer)
    assert not torch.equal(before, after)
    addresses = [tensor.data_ptr() for _, tensor in made.layer.tensors()]
    assert made.layer.workspace is not None
    scratch = made.layer.workspace.data_ptr()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call.run(made.layer)
    graph.replay()
    assert torch.equal(out, before)
    for _ in range(3):
        made.layer.update_(other.layer)
        graph.replay()
        assert torch.equal(out, after)
        assert torch.equal(call.run(made.layer), after)
    made.layer.workspace.reset()
    graph.replay()
    assert torch.equal(out, after)
    assert [tensor.data_ptr() for _, tensor in made.layer.tensors()] == addresses
    assert made.layer.workspace.data_ptr() == scratch


@few_and_many_rows
@in_child(timeout_s=120)
def test_a_replay_allocates_nothing_and_a_graph_leaves_nothing(tokens: int) -> None:
    case = replace(CASE, tokens=tokens)
    made = make_layer(case, "cuda")
    call = make_call(case, made.layer)
    for _ in range(2):  # the first capture of a process makes what torch keeps for all of them
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call.run(made.layer)
        del graph
        call.run(made.layer)
        torch.cuda.synchronize()
        held = torch.cuda.memory_allocated()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call.run(made.layer)
    before = torch.cuda.memory_stats()
    for _ in range(100):
        graph.replay()
    torch.cuda.synchronize()
    after = torch.cuda.memory_stats()
    for counter in ("allocation.all.allocated", "num_device_alloc"):
        assert after[counter] == before[counter], counter
    del graph, out
    assert torch.cuda.memory_allocated() == held


@few_and_many_rows
@in_child(timeout_s=180)
def test_many_layers_in_one_graph_share_its_scratch(tokens: int) -> None:
    """Scratch is given back to the pool after each call of the capture, so it does not add up."""
    case = replace(CASE, tokens=tokens)
    pieces = [make_layer(replace(case, seed=seed), "cuda") for seed in range(24)]
    call = make_call(case, pieces[0].layer)
    wants = [call.run(made.layer) for made in pieces]
    assert pieces[0].layer.workspace is not None
    scratch = pieces[0].layer.workspace.captured("cuda", call.ids.numel()).plan.nbytes
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = [call.run(made.layer) for made in pieces]
    grown = torch.cuda.memory_allocated() - held
    assert grown <= sum(out.nbytes + 512 for out in outs) + scratch, (grown, scratch)
    graph.replay()
    assert all(torch.equal(out, want) for out, want in zip(outs, wants, strict=True))


@few_and_many_rows
@pytest.mark.parametrize("between", [False, True], ids=["layers alone", "torch between"])
def test_layers_that_take_each_others_output(tokens: int, between: bool) -> None:
    """Blocks may come before the kernel before has ended: what it wrote must be there all the same."""
    case = replace(CASE, tokens=tokens, scaling=3.0)  # so that numbers do not die away
    layers = [make_layer(replace(case, seed=seed), "cuda").layer for seed in range(4)]
    call = make_call(case, layers[0])
    outs = [torch.empty_like(call.x) for _ in layers]

    def run(*, apart: bool) -> torch.Tensor:
        x = call.x
        for layer, out in zip(layers, outs, strict=True):
            replace(call, x=x).run(layer, out=out)
            x = out.add_(0.125) if between else out
            if apart:
                torch.cuda.synchronize()
        return x

    want = run(apart=True).clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = run(apart=False)
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for again in (graph.replay, lambda: run(apart=False)):
        for _ in range(500):
            again()
            wrong.add_((got != want).any())
    assert want.isfinite().all()
    assert want.norm() > 0.1 * call.x.norm()
    assert int(wrong) == 0
