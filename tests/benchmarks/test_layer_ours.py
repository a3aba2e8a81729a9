"""The workspace that is new and zeroed in every call."""

from dataclasses import replace

import torch
from layer_ours import Ours, ZeroedWorkspace
from layer_problems import FORMATS, LayerShape
from layer_tensors import random_layer, random_routing

from marlin_moe import fused_marlin_moe

SMALL = LayerShape(name="small", num_experts=4, top_k=2, hidden_size=128, intermediate_size=64, group_size=32)


def test_every_call_gets_new_zeros_for_its_rows() -> None:
    workspace = ZeroedWorkspace.attach(random_layer(SMALL, FORMATS["int4"], device="cpu"))
    workspace.rows = 6
    leases = [workspace.bound("reference", top_k=2) for _ in range(2)]
    first, second = (lease.scratch.bytes for lease in leases)
    assert first.data_ptr() != second.data_ptr()
    assert not torch.count_nonzero(first)
    for lease in leases:
        assert lease.plan.rows == 6
        assert lease.scratch.bytes.nbytes == lease.plan.nbytes
        start = lease.scratch.bytes.data_ptr()
        offsets = {name: address - start for name, address in lease.addresses.items()}
        assert offsets == {buffer.name: buffer.offset_bytes for buffer in lease.plan.buffers}
    assert workspace.nbytes == 0  # nothing stays with the layer


def test_a_layer_on_it_gives_the_same_result() -> None:
    layer = random_layer(SMALL, FORMATS["int4"], device="cpu")
    per_call = replace(layer, workspace=ZeroedWorkspace.attach(layer))
    routing = random_routing(SMALL, tokens=3, device="cpu")
    x = torch.randn(3, SMALL.hidden_size)
    per_call.workspace.rows = routing.ids.numel()
    want = fused_marlin_moe(x, layer, routing.weights, routing.ids)
    assert torch.equal(fused_marlin_moe(x, per_call, routing.weights, routing.ids), want)


def test_inside_a_capture_the_call_says_how_many_rows() -> None:
    workspace = ZeroedWorkspace.attach(random_layer(SMALL, FORMATS["int4"], device="cpu"))
    assert workspace.captured("reference", 10).plan.rows == 10


def test_what_the_layers_hold_is_counted_once_and_what_a_call_needs_by_its_rows() -> None:
    layers = [random_layer(SMALL, FORMATS["int4"], device="cpu") for _ in range(2)]
    ours = Ours(layers, backend="reference")
    assert ours.layer_workspace_bytes() == 0
    routing = random_routing(SMALL, tokens=3, device="cpu")
    for index in range(2):
        ours(index, torch.randn(3, SMALL.hidden_size), routing)
    held = ours.layer_workspace_bytes()
    assert held == layers[1].workspace.nbytes > 0
    assert 0 < ours.workspace_bytes(6) <= held
