"""The activations between the two GEMMs, and their formulas."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch.nn import functional

from .errors import OpError

PARAMETERS = ("alpha", "limit", "beta", "linear_beta")


@dataclass(frozen=True, slots=True)
class Activation:
    """An activation by name, with the parameters that it takes.

    gate and up are the two halves of w13's output; an ungated activation has one, here h.

        kind           formula                                                     parameters
        silu           silu(gate) * up                                             none
        gelu           gelu(gate) * up, by erf                                     none
        gelu_tanh      gelu(gate) * up, by the tanh approximation                  none
        swiglu_oai     g * sigmoid(alpha * g) * (u + 1)                            alpha (1.702), limit (7)
                       with g = min(gate, limit), u = clamp(up, -limit, limit)     as in gpt-oss
        silu_clamped   silu(g) * u, with g and u as above                          limit
        situ           beta * tanh(gate / beta) * sigmoid(gate) * u                beta, linear_beta or None
                       with u = linear_beta * tanh(up / linear_beta), or up
        silu_no_mul    silu(h)                                                     none, ungated
        relu2          max(h, 0) ** 2                                              none, ungated

    where silu(v) = v * sigmoid(v). Every formula gives 0 where gate and up (or h) are 0, which the padded
    columns of w13 rely on.

    Raises:
        TypeError: `kind` is no str, or a parameter no number.
        OpError: an unknown kind; a parameter that it does not take, lacks, or that is not positive.
    """

    kind: str
    alpha: float | None = field(default=None, kw_only=True)
    limit: float | None = field(default=None, kw_only=True)
    beta: float | None = field(default=None, kw_only=True)
    linear_beta: float | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if not isinstance(self.kind, str):
            raise TypeError(f"Activation.kind: expected a str, got {type(self.kind).__name__} {self.kind!r}.")
        if self.kind not in KINDS:
            raise OpError(f"activation: expected one of {', '.join(KINDS)}, got {self.kind!r}.")
        formula = KINDS[self.kind]
        taken = formula.required + tuple(formula.optional)
        for name in PARAMETERS:
            value = getattr(self, name)
            if value is None:
                value = formula.optional.get(name)
            if value is None and name in formula.required:
                raise OpError(
                    f"activation {self.kind}: expected {name}= because its formula needs it, got none. "
                    f"Give Activation({self.kind!r}, {name}=...)."
                )
            if value is not None and name not in taken:
                raise OpError(
                    f"activation {self.kind}: expected {' and '.join(taken) or 'no parameters'}, "
                    f"got {name}={value!r}. Leave it out, or choose the kind that takes it."
                )
            object.__setattr__(self, name, _positive(value, f"activation {self.kind}: {name}"))

    @classmethod
    def parse(cls, value: "str | Activation") -> "Activation":
        """The activation of a name, or itself."""
        if isinstance(value, Activation):
            return value
        if isinstance(value, str):
            return cls(value)
        raise TypeError(
            f"activation: expected a name or an Activation, got {type(value).__name__} {value!r}."
        )

    @property
    def gated(self) -> bool:
        """Whether w13 has a gate and an up half."""
        return KINDS[self.kind].gated

    def apply(self, gate: torch.Tensor, up: torch.Tensor | None = None) -> torch.Tensor:
        """The activation of gate [..., I] and up [..., I] (None if ungated), a new tensor of gate's dtype.

        Raises:
            OpError: `up` is given to an ungated activation, or missing for a gated one.
        """
        if self.gated == (up is None):
            wanted = "gate and up" if self.gated else "one tensor, because it is ungated"
            raise OpError(
                f"activation {self.kind}: expected {wanted}, got up {'absent' if up is None else 'too'}."
            )
        return KINDS[self.kind].formula(self, gate, gate if up is None else up)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A row of the table: `formula` of (activation, gate, up), `optional` parameters with their defaults."""

    formula: Callable[[Activation, torch.Tensor, torch.Tensor], torch.Tensor]
    gated: bool = True
    required: tuple[str, ...] = ()
    optional: dict[str, float | None] = field(default_factory=dict)


def _swiglu_oai(a: Activation, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    g, u = _clamped(a, gate, up)
    return g * torch.sigmoid(_given(a.alpha) * g) * (u + 1)


def _silu_clamped(a: Activation, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    g, u = _clamped(a, gate, up)
    return functional.silu(g) * u


def _situ(a: Activation, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    u = up if a.linear_beta is None else a.linear_beta * torch.tanh(up / a.linear_beta)
    beta = _given(a.beta)
    return beta * torch.tanh(gate / beta) * torch.sigmoid(gate) * u


def _clamped(a: Activation, gate: torch.Tensor, up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    limit = _given(a.limit)
    return gate.clamp(max=limit), up.clamp(min=-limit, max=limit)


def _given(value: float | None) -> float:
    if value is None:
        raise OpError("activation: expected a parameter that its constructor checked, got None.")
    return value


def _positive(value: float | None, name: str) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name}: expected a number, got {type(value).__name__} {value!r}.")
    if not (math.isfinite(value) and value > 0):
        raise OpError(f"{name}: expected a positive finite number, got {value!r}.")
    return float(value)


KINDS: dict[str, Kind] = {
    "silu": Kind(formula=lambda a, gate, up: functional.silu(gate) * up),
    "gelu": Kind(formula=lambda a, gate, up: functional.gelu(gate) * up),
    "gelu_tanh": Kind(formula=lambda a, gate, up: functional.gelu(gate, approximate="tanh") * up),
    "swiglu_oai": Kind(formula=_swiglu_oai, optional={"alpha": 1.702, "limit": 7.0}),
    "silu_clamped": Kind(formula=_silu_clamped, required=("limit",)),
    "situ": Kind(formula=_situ, required=("beta",), optional={"linear_beta": None}),
    "silu_no_mul": Kind(formula=lambda a, h, _: functional.silu(h), gated=False),
    "relu2": Kind(formula=lambda a, h, _: functional.relu(h).square(), gated=False),
}
