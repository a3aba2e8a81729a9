"""Arguments that are refused, or not what their bytes say, after a call that was right; on every backend."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from marlin_moe import MarlinMoEError, MarlinMoELayer, fused_marlin_moe
from moe_cases import MoECall, MoECase, make_call, make_layer
from places import Place

CASE = MoECase(tokens=9, num_experts=4, hidden_size=128, padded_intermediate_size=64, top_k=2)


def ready(place: Place) -> tuple[MarlinMoELayer, MoECall, torch.Tensor]:
    """(layer, call, answer) of a call that is made ready where calls are."""
    case = place.takes(CASE)
    made = make_layer(case, place.device)
    call = make_call(case, made.layer)
    call.run(made.layer, backend=place.backend)
    return made.layer, call, call.run(made.layer, backend=place.backend)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"topk_ids": [[0, 1]]}, r"topk_ids: expected Tensor, got list"),
        ({"topk_weights": None}, r"topk_weights: expected Tensor, got NoneType"),
        ({"expert_map": [0]}, r"expert_map: expected Tensor or None, got list"),
        ({"activation": ["silu"]}, r"activation: expected a name or an Activation, got list"),
        ({"backend": ["cuda"]}, r"backend: expected a name or None, got list"),
        ({"apply_router_weight_on_input": 0}, r"apply_router_weight_on_input: expected bool, got int"),
        ({"routed_scaling_factor": True}, r"routed_scaling_factor: expected int or float, got bool"),
    ],
    ids=str,
)
def test_wrong_types(place: Place, changed: dict[str, Any], message: str) -> None:
    layer, call, _ = ready(place)
    given = {"x": call.x, "topk_weights": call.weights, "topk_ids": call.ids, "backend": place.backend}
    with pytest.raises(TypeError, match=message):
        fused_marlin_moe(layer=layer, **call.options | given | changed)


def test_lazily_negated_tensors(place: Place) -> None:
    layer, call, want = ready(place)
    for name in ("x", "weights"):
        negated = replace(call, **{name: torch._neg_view(-getattr(call, name))})
        for _ in range(2):
            assert torch.equal(negated.run(layer, backend=place.backend), want), name
    assert torch.equal(call.run(layer, backend=place.backend), want)


def test_out_over_the_layers_scales(place: Place) -> None:
    layer, call, want = ready(place)
    out = layer.w13.scales.view(call.x.dtype).view(-1)[: call.x.numel()].view(call.x.shape)
    with pytest.raises(MarlinMoEError, match=r"out: expected memory of its own.* layer\.w13\.scales"):
        call.run(layer, out=out, backend=place.backend)
    assert torch.equal(call.run(layer, backend=place.backend), want)
