"""Random layers are layers, and the dense arithmetic they are compared with is the op's."""

import pytest
import torch
from layer_problems import FORMATS, LayerShape
from layer_tensors import dense_rows, random_layer, random_routing, relative_error, rows_of

from marlin_moe import fused_marlin_moe

SMALL = LayerShape(
    name="small", num_experts=8, top_k=2, hidden_size=256, intermediate_size=128, group_size=32
)


@pytest.mark.parametrize("form", FORMATS.values(), ids=lambda form: form.name)
def test_the_reference_backend_agrees_with_dense_rows(form) -> None:
    torch.manual_seed(0)
    layer = random_layer(SMALL, form, device="cpu")
    routing = random_routing(SMALL, tokens=9, device="cpu")
    x = torch.randn(9, SMALL.hidden_size).bfloat16()
    y = fused_marlin_moe(x, layer, routing.weights, routing.ids)
    rows = torch.tensor([7, 2, 5])
    want = dense_rows(layer, x[rows], rows_of(routing, rows))
    assert relative_error(y[rows], want) < 3e-3  # y is rounded to bf16
    assert relative_error(y[rows.flip(0)], want) > 0.1


def test_routing_names_each_expert_of_a_token_once() -> None:
    routing = random_routing(SMALL, tokens=50, device="cpu")
    assert routing.ids.dtype == torch.int32
    assert (routing.ids[:, 0] != routing.ids[:, 1]).all()
    assert routing.active_experts == len(set(routing.ids.flatten().tolist()))


def test_what_is_no_number_is_infinitely_wrong() -> None:
    assert relative_error(torch.tensor([1.0, float("nan")]), torch.ones(2)) == float("inf")
    assert relative_error(torch.tensor([3.0, 4.0]), torch.tensor([3.0, 0.0])) == pytest.approx(4 / 3)
