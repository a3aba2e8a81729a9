"""The op under tracers: one node with the layer's own tensors, and the same bits."""

import pytest
import torch

from marlin_moe import Activation, MarlinMoELayer, fused_marlin_moe
from marlin_moe.kernels.flat import unflatten
from random_layer import random_calls, random_layer

OP = torch.ops.marlin_moe.fused_moe
FLAT_SILU = ("silu", [0.0, 0.0, 0.0, 0.0], False, 1.0, None)


@pytest.fixture(scope="module")
def layer() -> MarlinMoELayer:
    return random_layer(0, max_tokens=8, top_k=2)


@pytest.fixture
def fresh_compiler() -> None:
    torch.compiler.reset()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("activation", ["silu", Activation("swiglu_oai", limit=0.05)])
def test_fullgraph(layer: MarlinMoELayer, activation: str | Activation, fresh_compiler: None) -> None:
    x, weights, ids = random_calls(1, 5, 2, layer)

    def call(x: torch.Tensor) -> torch.Tensor:
        return fused_marlin_moe(x, layer, weights, ids, activation=activation, routed_scaling_factor=2.5) + 1

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), call(x))
    assert not torch.equal(call(x), fused_marlin_moe(x, layer, weights, ids) + 1), "the options matter"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_out_is_mutated_in_a_graph(layer: MarlinMoELayer, fresh_compiler: None) -> None:
    x, weights, ids = random_calls(2, 3, 2, layer)

    def call(x: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(x)
        return fused_marlin_moe(x, layer, weights, ids, out=out)

    assert torch.equal(torch.compile(call, fullgraph=True, backend="aot_eager")(x), call(x))


class Model(torch.nn.Module):
    """A forward around a layer that is no part of the module."""

    def __init__(self, layer: MarlinMoELayer) -> None:
        super().__init__()
        self.call = lambda *args: fused_marlin_moe(args[0], layer, args[1], args[2])

    def forward(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return self.call(x, weights, ids)


@pytest.mark.filterwarnings("ignore")
def test_export_keeps_one_node(layer: MarlinMoELayer, fresh_compiler: None) -> None:
    inputs = random_calls(3, 4, 2, layer)
    program = torch.export.export(Model(layer), inputs)
    calls = [node.target for node in program.graph.nodes if node.op == "call_function"]
    assert calls == [OP.default]
    assert torch.equal(program.module()(*inputs), fused_marlin_moe(inputs[0], layer, *inputs[1:]))


@pytest.mark.filterwarnings("ignore")
def test_torchs_own_checks_of_the_registration(layer: MarlinMoELayer) -> None:
    x, weights, ids = random_calls(4, 3, 2, layer)
    flat = (*layer.flat.tensors, list(layer.flat.facts), *FLAT_SILU)
    torch.library.opcheck(OP, (x, weights, ids, None, *flat))


def test_the_layer_is_found_again_by_its_weights(layer: MarlinMoELayer) -> None:
    assert unflatten(layer.flat.tensors, layer.flat.facts) is layer


def test_a_layer_is_made_of_copies(layer: MarlinMoELayer) -> None:
    copies = tuple(None if tensor is None else tensor.clone() for tensor in layer.flat.tensors)
    made = unflatten(copies, layer.flat.facts)
    assert made is not layer
    assert made.flat.facts == layer.flat.facts
    x, weights, ids = random_calls(5, 3, 2, layer)
    through_op = OP(x, weights, ids, None, *copies, list(layer.flat.facts), *FLAT_SILU)
    assert torch.equal(through_op, fused_marlin_moe(x, layer, weights, ids))
