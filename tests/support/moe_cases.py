"""Calls of the op as plain facts: the layer and the tensors made of them, and the float64 answer.

MoECase -- make_layer --> (MarlinMoELayer, biases in column order)
     '---- make_call ---> MoECall -- run --> the op's answer
                              '---- DenseMoE(layer) --> the float64 answer, on the layer's device
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from marlin_moe import Activation, MarlinMoELayer, fused_marlin_moe
from marlin_moe.kernels.arguments import MoEArguments
from oracle import marlin_bias, marlin_scales

LIMITS = {torch.float32: 1e-5, torch.bfloat16: 5e-3, torch.float16: 1e-3}
"""Relative Frobenius error against float64, by the dtype of x."""

ACTIVATIONS: dict[str, Activation] = {
    "silu": Activation("silu"),
    "gelu": Activation("gelu"),
    "gelu_tanh": Activation("gelu_tanh"),
    "swiglu_oai": Activation("swiglu_oai", alpha=1.5, limit=2.0),
    "silu_clamped": Activation("silu_clamped", limit=1.0),
    "situ": Activation("situ", beta=1.5, linear_beta=2.5),
    "situ plain": Activation("situ", beta=0.8),
    "silu_no_mul": Activation("silu_no_mul"),
    "relu2": Activation("relu2"),
}

FORMAT_FACTORS: dict[str, list[Any]] = {
    "bits": [4, 8],
    "group_size": [32, 64, 128, None],
    "symmetric": [True, False],
    "w2_bits": [4, 8],
    "w2_group_size": [32, 64, 128, None],
    "dtype": [torch.bfloat16, torch.float16],
}
"""Values of a case's fields that tests combine: the formats of both matrices."""

CALL_FACTORS: dict[str, list[Any]] = {
    "biased": [False, True],
    "activation": list(ACTIVATIONS),
    "on_input": [False, True],
    "scaling": [1.0, 2.5],
    "ids_dtype": [torch.int64, torch.int32],
    "weights_in_x_dtype": [False, True],
    "expert_map": ["none", "ranks", "shuffled"],
    "routing": ["random", "one", "few", "holes"],
    "view": ["plain", "gaps", "columns", "odd"],
}
"""The same for what a call can ask for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MoECase:
    """A layer and a call of it; `routing` and `view` name what is done to ids and x.

    expert_map: none, "ranks" (every third global expert is elsewhere) or "shuffled".
    routing: random, "one" (all slots on one expert), "few" (two experts of all) or "holes" (ids of -1).
    view: plain, "gaps" (rows of x lie apart), "columns" (x cannot be read in rows), "odd" (x is not aligned).
    """

    tokens: int = 7
    top_k: int = 4
    num_experts: int = 16
    hidden_size: int = 512
    padded_intermediate_size: int = 256
    padding: int = 0
    bits: int = 4
    group_size: int | None = 32
    symmetric: bool = True
    w2_bits: int | None = None
    w2_group_size: int | None = 0
    dtype: torch.dtype = torch.bfloat16
    act_order: bool = False
    biased: bool = False
    activation: str = "silu"
    on_input: bool = False
    scaling: float = 1.0
    ids_dtype: torch.dtype = torch.int64
    weights_in_x_dtype: bool = False
    expert_map: str = "none"
    routing: str = "random"
    view: str = "plain"
    max_tokens: int = 8192
    seed: int = 0

    @property
    def gated(self) -> bool:
        return ACTIVATIONS[self.activation].gated

    @property
    def w2_format(self) -> tuple[int, int | None]:
        """(bits, group size) of w2: w13's unless it has its own."""
        group = self.group_size if self.w2_group_size == 0 else self.w2_group_size
        return self.w2_bits or self.bits, group

    @property
    def fits(self) -> bool:
        """Whether there is such a layer: groups divide K, and the call has experts enough."""
        group, own = self.group_size, self.w2_format[1]
        whole = group is None or (self.hidden_size % group == 0 and self.hidden_size > group)
        inner = own is None or (
            self.padded_intermediate_size % own == 0 and self.padded_intermediate_size > own
        )
        return whole and inner

    def __str__(self) -> str:
        default = MoECase()
        changed = (
            (name, getattr(self, name))
            for name in self.__slots__
            if getattr(self, name) != getattr(default, name)
        )
        return " ".join(f"{name}={value}" for name, value in changed) or "default"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CaseLayer:
    """A layer with its biases in column order, [E, N] without padding, None where absent."""

    layer: MarlinMoELayer
    w13_bias: torch.Tensor | None = None
    w2_bias: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MoECall:
    """x [M, H], topk_weights [M, T], topk_ids [M, T] and the op's options."""

    x: torch.Tensor
    weights: torch.Tensor
    ids: torch.Tensor
    options: dict[str, Any]

    def run(self, layer: MarlinMoELayer, **more: Any) -> torch.Tensor:
        return fused_marlin_moe(self.x, layer, self.weights, self.ids, **(self.options | more))

    def arguments(self, layer: MarlinMoELayer) -> MoEArguments:
        """As the op makes them."""
        return MoEArguments(
            x=self.x,
            layer=layer,
            topk_weights=self.weights,
            topk_ids=self.ids,
            expert_map=layer.expert_map,
            out=None,
            **self.options,
        )

    def first(self, tokens: int) -> MoECall:
        """The call of its first tokens."""
        return replace(self, x=self.x[:tokens], weights=self.weights[:tokens], ids=self.ids[:tokens])


def make_layer(case: MoECase, device: torch.device | str = "cpu") -> CaseLayer:
    """The layer of a case, of random words (any bits are valid values) and weights of about 0.1."""
    made = torch.Generator().manual_seed(case.seed)
    e, h, ip = case.num_experts, case.hidden_size, case.padded_intermediate_size
    halves, size = (2 if case.gated else 1), ip - case.padding
    tensors: dict[str, torch.Tensor] = {}
    biases: dict[str, torch.Tensor] = {}
    for name, size_k, size_n, (bits, group) in (
        ("w13", h, halves * ip, (case.bits, case.group_size)),
        ("w2", ip, h, case.w2_format),
    ):
        groups = 1 if group is None else size_k // group
        scales = torch.rand(e, size_n, groups, generator=made) * (0.4 / 2**bits) + 0.01 / 2**bits
        columns = torch.randn(e, size_n, generator=made)
        if name == "w13":  # padded columns give 0; the padded rows of w2 stay random, so others would be seen
            for tensor in (scales.view(e, halves, ip, groups), columns.view(e, halves, ip)):
                tensor[:, :, size:] = 0
        tensors[f"{name}_qweight"] = _words(made, e, size_k // 16, size_n * bits // 2)
        tensors[f"{name}_scales"] = torch.stack([marlin_scales(s.to(case.dtype)) for s in scales])
        if not case.symmetric:
            tensors[f"{name}_zero_points"] = _words(made, e, groups, size_n * bits // 32)
        if case.biased:
            columns = columns.to(case.dtype)
            tensors[f"{name}_bias"] = torch.stack([marlin_bias(row) for row in columns])
            biases[f"{name}_bias"] = columns
    if case.biased:
        biases["w13_bias"] = biases["w13_bias"].view(e, halves, ip)[:, :, :size].flatten(1)
    if case.act_order:
        orders = [torch.randperm(h, generator=made) for _ in range(e)]
        tensors["w13_sort_order"] = torch.stack(orders).to(torch.int32)
    local = _expert_map(case, made)
    if local is not None:
        tensors["expert_map"] = local
    bits, group = case.w2_format
    layer = MarlinMoELayer.from_marlin(
        **{name: tensor.to(device) for name, tensor in tensors.items()},
        bits=case.bits,
        group_size=case.group_size,
        symmetric=case.symmetric,
        w2_bits=bits,
        w2_group_size=-1 if group is None else group,
        intermediate_size=size,
        gated=case.gated,
        top_k=case.top_k if local is None and case.top_k <= e else None,
        max_tokens=case.max_tokens,
    )
    return CaseLayer(layer=layer, **{name: bias.to(device) for name, bias in biases.items()})


def make_call(case: MoECase, layer: MarlinMoELayer) -> MoECall:
    """The call of a case, on the layer's device."""
    made = torch.Generator().manual_seed(case.seed + 1)
    tokens, top_k, experts = case.tokens, case.top_k, layer.num_global_experts
    x = torch.randn(tokens, case.hidden_size, generator=made).to(case.dtype)
    weights = torch.rand(tokens, top_k, generator=made)
    if case.weights_in_x_dtype:
        weights = weights.to(case.dtype)
    ids = _ids(case.routing, made, tokens, top_k, experts).to(case.ids_dtype)
    return MoECall(
        x=_view(case.view, x.to(layer.device)),
        weights=weights.to(layer.device),
        ids=ids.to(layer.device),
        options={
            "activation": ACTIVATIONS[case.activation],
            "apply_router_weight_on_input": case.on_input,
            "routed_scaling_factor": case.scaling,
        },
    )


def large_layer(
    device: torch.device | str,
    *,
    num_experts: int,
    hidden_size: int,
    padded_intermediate_size: int,
    dtype: torch.dtype = torch.bfloat16,
    group_size: int = 32,
    seed: int = 0,
    **facts: Any,
) -> MarlinMoELayer:
    """A symmetric int4 layer made where it lies, without a copy on the CPU: for sizes that count."""
    made = torch.Generator(device).manual_seed(seed)
    tensors = {}
    for name, size_k, size_n in (
        ("w13", hidden_size, 2 * padded_intermediate_size),
        ("w2", padded_intermediate_size, hidden_size),
    ):
        shape = (num_experts, size_k // 16, size_n * 2)
        low, high = -(2**31), 2**31 - 1
        words = torch.randint(low, high, shape, generator=made, dtype=torch.int32, device=device)
        groups = (num_experts, size_k // group_size, size_n)
        tensors[f"{name}_qweight"] = words
        tensors[f"{name}_scales"] = (torch.rand(groups, generator=made, device=device) * 0.02 + 0.002).to(
            dtype
        )
    return MarlinMoELayer.from_marlin(**tensors, bits=4, group_size=group_size, symmetric=True, **facts)


class DenseMoE:
    """The exact answer of a layer: float64 products with its dequantized weights, expert by expert.

    `rounded`: it is rounded to this dtype wherever a kernel on 16 bits rounds: weights, activations,
    and the row of each slot.
    """

    rounded: torch.dtype | None = None

    def __init__(self, made: CaseLayer, *, rounded: torch.dtype | None = None) -> None:
        self.rounded = rounded
        w13, w2 = (self._round(weights) for weights in made.layer.dequantize())
        self._set(w13, w2, made.layer.expert_map, gated=made.layer.gated)
        self.w13_bias = None if made.w13_bias is None else made.w13_bias.double()
        self.w2_bias = None if made.w2_bias is None else made.w2_bias.double()

    @classmethod
    def of_weights(cls, w13: torch.Tensor, w2: torch.Tensor) -> DenseMoE:
        """Of gated weights [E, 2I, H] and [E, H, I] without biases; ids count these experts."""
        dense = cls.__new__(cls)
        dense._set(w13, w2, None, gated=True)
        dense.w13_bias = dense.w2_bias = None
        return dense

    def _set(
        self, w13: torch.Tensor, w2: torch.Tensor, expert_map: torch.Tensor | None, *, gated: bool
    ) -> None:
        self.w13, self.w2 = w13.double(), w2.double()  # [E, 2I, H], [E, H, I]
        self.expert_map, self.gated = expert_map, gated

    def __call__(self, call: MoECall) -> torch.Tensor:
        """float64 [M, H]."""
        x, weights = call.x.double(), call.weights.double()
        experts = self._local(call.ids)
        on_input, activation = call.options["apply_router_weight_on_input"], call.options["activation"]
        out = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
        for expert in experts[experts >= 0].unique().tolist():
            token, slot = torch.nonzero(experts == expert, as_tuple=True)
            weight = weights[token, slot].unsqueeze(1)
            hidden = (x[token] * weight if on_input else x[token]) @ self.w13[expert].T
            if self.w13_bias is not None:
                hidden += self.w13_bias[expert]
            parts = hidden.chunk(2, 1) if self.gated else (hidden,)
            y = self._round(activation.apply(*parts)) @ self.w2[expert].T
            if self.w2_bias is not None:
                y += self.w2_bias[expert]
            out.index_add_(0, token, self._round(y if on_input else y * weight))
        return out * call.options["routed_scaling_factor"]

    def _round(self, values: torch.Tensor) -> torch.Tensor:
        return values if self.rounded is None else values.to(self.rounded).to(values.dtype)

    def _local(self, ids: torch.Tensor) -> torch.Tensor:
        """The expert of this layer that each slot reaches, or -1."""
        ids = ids.long()
        if self.expert_map is None:
            return ids
        return torch.where(ids < 0, -1, self.expert_map.long()[ids.clamp(min=0)])


def difference(got: torch.Tensor, want: torch.Tensor) -> tuple[float, str]:
    """(relative Frobenius error, the worst coordinate with both values)."""
    if got.shape != want.shape:
        raise AssertionError(f"shape {tuple(got.shape)}, expected {tuple(want.shape)}")
    if not got.numel():
        return 0.0, "nothing to compare"
    gap = (got.double() - want.double()).abs()
    gap = torch.where(gap.isfinite(), gap, torch.inf)
    place = divmod(int(gap.argmax()), got.shape[1])
    text = f"worst at {place}: got {got[place].item()!r}, expected {want[place].item()!r}"
    norm = gap.norm().item()
    return (norm / want.double().norm().item() if want.any() else norm and float("inf")), text


def check(
    case: MoECase, call: MoECall, got: torch.Tensor, want: torch.Tensor, *, limit: float | None = None
) -> None:
    """Fail unless the op's answer has x's dtype and is as near to the exact one as that dtype allows."""
    assert (got.dtype, got.device) == (call.x.dtype, call.x.device)
    error, worst = difference(got, want)
    limit = LIMITS[case.dtype] if limit is None else limit
    assert error < limit, (
        f"relative error {error:.2e}, limit {limit:.0e}; {worst}\n  case: {case}\n  seed: {case.seed}"
    )


def _words(made: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randint(-(2**31), 2**31, shape, generator=made, dtype=torch.int64).to(torch.int32)


def _expert_map(case: MoECase, made: torch.Generator) -> torch.Tensor | None:
    """int32 of more global experts than the layer has, each of its own named once."""
    if case.expert_map == "none":
        return None
    total = case.num_experts + case.num_experts // 2 + 1
    if case.expert_map == "shuffled":
        places = torch.randperm(total, generator=made)[: case.num_experts]
    else:
        places = torch.tensor([p for p in range(total) if p % 3 != 1][: case.num_experts])
    local = torch.full((total,), -1, dtype=torch.int32)
    local[places] = torch.arange(len(places), dtype=torch.int32)
    return local


def _ids(routing: str, made: torch.Generator, tokens: int, top_k: int, experts: int) -> torch.Tensor:
    ids = torch.randint(experts, (tokens, top_k), generator=made)
    if routing == "one":
        return torch.full_like(ids, experts - 1)
    if routing == "few":
        return torch.where(ids % 2 == 0, 0, experts // 2)
    if routing == "holes":
        return torch.where(torch.rand(ids.shape, generator=made) < 0.4, -1, ids)
    return ids


def _view(view: str, x: torch.Tensor) -> torch.Tensor:
    if view == "gaps":
        return torch.cat([x, torch.full_like(x, torch.nan)], 1)[:, : x.shape[1]]
    if view == "columns":
        return x.t().contiguous().t()
    if view == "odd":
        around = torch.full((x.numel() + 1,), torch.nan, dtype=x.dtype, device=x.device)
        return around[1:].view(x.shape).copy_(x)
    return x
