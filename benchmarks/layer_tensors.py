"""Layers of random words, made where they are measured: any bits are a valid layer."""

from dataclasses import dataclass, replace

import torch
from layer_problems import LayerShape, WeightFormat

from marlin_moe import MarlinMoELayer

MAX_TOKENS = 8192
SCALE_RANGE = (0.001, 0.011)  # of 4-bit weights: a layer's output is of the size of its input


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """Where M tokens go in one layer: weights float32 [M, T], ids int32 [M, T]."""

    weights: torch.Tensor
    ids: torch.Tensor

    @property
    def active_experts(self) -> int:
        """Experts that get a token."""
        return self.ids.unique().numel()


def random_layer(shape: LayerShape, form: WeightFormat, *, device: str = "cuda") -> MarlinMoELayer:
    """A layer with random words, scales, zero points and sort order."""
    tensors: dict[str, torch.Tensor] = {}
    for name, (size_k, size_n) in zip(("w13", "w2"), shape.matrices, strict=True):
        groups = size_k // shape.group_size
        tensors[f"{name}_qweight"] = _words(device, shape.num_experts, size_k // 16, size_n * form.bits // 2)
        low, high = (bound / 2 ** (form.bits - 4) for bound in SCALE_RANGE)
        scales = torch.empty(shape.num_experts, groups, size_n, device=device).uniform_(low, high)
        tensors[f"{name}_scales"] = scales.bfloat16()
        if not form.symmetric:
            tensors[f"{name}_zero_points"] = _words(
                device, shape.num_experts, groups, size_n * form.bits // 32
            )
    if form.act_order:
        keys = torch.rand(shape.num_experts, shape.hidden_size, device=device)
        tensors["w13_sort_order"] = keys.argsort(dim=1).int()
    return MarlinMoELayer.from_marlin(
        **tensors,
        bits=form.bits,
        group_size=shape.group_size,
        symmetric=form.symmetric,
        top_k=shape.top_k,
        max_tokens=MAX_TOKENS,
    )


def random_routing(shape: LayerShape, *, tokens: int, device: str = "cuda") -> Routing:
    """Top-k of random scores."""
    scores = torch.randn(tokens, shape.num_experts, device=device).softmax(-1)
    weights, ids = scores.topk(shape.top_k)
    return Routing(weights=weights.contiguous(), ids=ids.int().contiguous())


def dense_rows(layer: MarlinMoELayer, x: torch.Tensor, routing: Routing) -> torch.Tensor:
    """float64 [M, H]: the layer's output for tokens x by dense arithmetic, one expert after another."""
    y = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for expert in routing.ids.unique().tolist():
        w13, w2 = (matrix[0].double() for matrix in layer.dequantize([expert]))  # [2I, H], [H, I]
        token, slot = (routing.ids == expert).nonzero(as_tuple=True)
        gate, up = (x[token].double() @ w13.t()).chunk(2, dim=1)
        part = (torch.nn.functional.silu(gate) * up) @ w2.t()
        y.index_add_(0, token, part * routing.weights[token, slot].double().unsqueeze(1))
    return y


def rows_of(routing: Routing, rows: torch.Tensor) -> Routing:
    """The routing of some tokens."""
    return replace(routing, weights=routing.weights[rows], ids=routing.ids[rows])


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Frobenius norm of the difference over that of `want`; infinite where a value is no number."""
    difference = ((got.double() - want.double()).norm() / want.double().norm()).item()
    return difference if torch.isfinite(got).all() else float("inf")


def _words(device: str, *shape: int) -> torch.Tensor:
    return torch.randint(-(2**31), 2**31, shape, dtype=torch.int32, device=device)
