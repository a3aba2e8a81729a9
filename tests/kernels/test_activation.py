"""Each activation against its formula, written with Python's math on single numbers."""

import dataclasses
import math
from collections.abc import Callable

import pytest
import torch

from marlin_moe import Activation, MarlinMoEError
from marlin_moe.kernels.activation import KINDS


def sigmoid(v: float) -> float:
    return 1 / (1 + math.exp(-v))


def bounded(v: float, low: float, high: float) -> float:
    return min(max(v, low), high)


def gelu_tanh(v: float) -> float:
    return 0.5 * v * (1 + math.tanh(math.sqrt(2 / math.pi) * (v + 0.044715 * v**3)))


def swiglu_oai(alpha: float, limit: float) -> Callable[[float, float], float]:
    def formula(gate: float, up: float) -> float:
        gate = min(gate, limit)
        return gate * sigmoid(alpha * gate) * (bounded(up, -limit, limit) + 1)

    return formula


GATED: dict[Activation, Callable[[float, float], float]] = {
    Activation("silu"): lambda gate, up: gate * sigmoid(gate) * up,
    Activation("gelu"): lambda gate, up: 0.5 * gate * (1 + math.erf(gate / math.sqrt(2))) * up,
    Activation("gelu_tanh"): lambda gate, up: gelu_tanh(gate) * up,
    Activation("swiglu_oai"): swiglu_oai(1.702, 7.0),
    Activation("swiglu_oai", alpha=1.0, limit=2): swiglu_oai(1.0, 2.0),
    Activation("silu_clamped", limit=3.0): lambda gate, up: (
        min(gate, 3) * sigmoid(min(gate, 3)) * bounded(up, -3, 3)
    ),
    Activation("situ", beta=4.0, linear_beta=25.0): lambda gate, up: (
        4 * math.tanh(gate / 4) * sigmoid(gate) * 25 * math.tanh(up / 25)
    ),
    Activation("situ", beta=2.0): lambda gate, up: 2 * math.tanh(gate / 2) * sigmoid(gate) * up,
}
UNGATED: dict[Activation, Callable[[float], float]] = {
    Activation("silu_no_mul"): lambda h: h * sigmoid(h),
    Activation("relu2"): lambda h: max(h, 0) ** 2,
}


def test_every_kind_is_checked_here() -> None:
    assert {a.kind for a in [*GATED, *UNGATED]} == set(KINDS)


@pytest.mark.parametrize("activation", GATED, ids=str)
def test_gated_formula(activation: Activation) -> None:
    values = [-30.0, -7.5, -3.1, -1.0, -0.25, 0.0, 0.5, 1.0, 2.5, 6.9, 7.1, 12.0, 40.0]
    gate, up = torch.cartesian_prod(torch.tensor(values), torch.tensor(values)).unbind(1)
    got = activation.apply(gate, up)
    expected = [GATED[activation](g, u) for g, u in zip(gate.tolist(), up.tolist(), strict=True)]
    assert activation.gated
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, torch.tensor(expected), rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("activation", UNGATED, ids=str)
def test_ungated_formula(activation: Activation) -> None:
    h = torch.linspace(-20, 20, 101)
    expected = torch.tensor([UNGATED[activation](v) for v in h.tolist()])
    assert not activation.gated
    torch.testing.assert_close(activation.apply(h), expected, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("activation", [*GATED, *UNGATED], ids=str)
def test_padded_columns_give_exactly_zero(activation: Activation) -> None:
    zero = torch.zeros(3)
    assert torch.equal(activation.apply(zero, zero if activation.gated else None), zero)


def test_the_inputs_are_left_alone() -> None:
    gate, up = torch.tensor([9.0, -9.0]), torch.tensor([9.0, -9.0])
    for activation in GATED:
        activation.apply(gate, up)
    for activation in UNGATED:
        activation.apply(gate)
    assert gate.tolist() == up.tolist() == [9.0, -9.0]


def test_defaults_are_filled_in_and_numbers_become_floats() -> None:
    assert Activation("swiglu_oai") == Activation("swiglu_oai", alpha=1.702, limit=7)
    assert Activation("silu").limit is None
    with pytest.raises(dataclasses.FrozenInstanceError):
        Activation("silu").kind = "gelu"  # type: ignore[misc]


def test_parse() -> None:
    given = Activation("situ", beta=4.0, linear_beta=25.0)
    assert Activation.parse(given) is given
    assert Activation.parse("gelu") == Activation("gelu")
    with pytest.raises(TypeError, match=r"activation: expected a name or an Activation, got int 3"):
        Activation.parse(3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kind", "parameters", "message"),
    [
        ("swish", {}, r"activation: expected one of silu, gelu, .*relu2, got 'swish'"),
        ("silu", {"limit": 7.0}, r"activation silu: expected no parameters, got limit=7.0"),
        ("relu2", {"alpha": 1.0}, r"activation relu2: expected no parameters, got alpha=1.0"),
        ("swiglu_oai", {"beta": 1.0}, r"activation swiglu_oai: expected alpha and limit, got beta=1.0"),
        (
            "silu_clamped",
            {},
            r"activation silu_clamped: expected limit= .*Activation\('silu_clamped', limit=",
        ),
        ("silu_clamped", {"limit": 1, "alpha": 2}, r"activation silu_clamped: expected limit, got alpha=2"),
        ("situ", {"linear_beta": 25.0}, r"activation situ: expected beta="),
        ("situ", {"beta": 0.0}, r"activation situ: beta: expected a positive finite number, got 0.0"),
        (
            "situ",
            {"beta": 4, "linear_beta": math.inf},
            r"linear_beta: expected a positive finite number, got inf",
        ),
        ("swiglu_oai", {"alpha": math.nan}, r"alpha: expected a positive finite number, got nan"),
        ("swiglu_oai", {"limit": -7.0}, r"limit: expected a positive finite number, got -7.0"),
    ],
)
def test_wrong_values(kind: str, parameters: dict[str, float], message: str) -> None:
    with pytest.raises(MarlinMoEError, match=message):
        Activation(kind, **parameters)


@pytest.mark.parametrize(
    ("kind", "parameters", "message"),
    [
        (None, {}, r"Activation.kind: expected a str, got NoneType"),
        ("situ", {"beta": "4"}, r"beta: expected a number, got str '4'"),
        ("situ", {"beta": True}, r"beta: expected a number, got bool True"),
    ],
)
def test_wrong_types(kind: str, parameters: dict[str, float], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        Activation(kind, **parameters)


def test_up_belongs_to_gated_kinds() -> None:
    h = torch.ones(2)
    with pytest.raises(MarlinMoEError, match=r"activation silu: expected gate and up, got up absent"):
        Activation("silu").apply(h)
    with pytest.raises(MarlinMoEError, match=r"activation relu2: expected one tensor, .* got up too"):
        Activation("relu2").apply(h, h)
