"""The op as torch knows it: `torch.ops.marlin_moe.fused_moe` and `fused_moe_out`, for tracing and export.

Eager calls do not pass through the dispatcher, which would cost as much as the launch; traced ones do.
"""

from typing import Any

import torch

from .activation import PARAMETERS, Activation
from .arguments import MoEArguments, check_types
from .call import run_checked
from .checks import check_type
from .flat import unflatten
from .layer import MarlinMoELayer

MATRICES = ", ".join(
    f"Tensor {m}_qweight, Tensor {m}_scales, Tensor? {m}_zero_points, "
    f"Tensor? {m}_sort_order, Tensor? {m}_bias"
    for m in ("w13", "w2")
)
OPTIONS = (
    "int[] facts, str activation, float[] activation_parameters, bool apply_router_weight_on_input, "
    "float routed_scaling_factor, str? backend"
)
INPUTS = "Tensor x, Tensor topk_weights, Tensor topk_ids, Tensor? expert_map"

library = torch.library.Library("marlin_moe", "DEF")
library.define(f"fused_moe({INPUTS}, {MATRICES}, {OPTIONS}) -> Tensor")
library.define(f"fused_moe_out(Tensor(a!) out, {INPUTS}, {MATRICES}, {OPTIONS}) -> ()")

Flat = torch.Tensor | None | list[int] | list[float] | str | bool | float


def _fused_moe(
    x: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    expert_map: torch.Tensor | None,
    *rest: Flat,
) -> torch.Tensor:
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _fused_moe_out(out, x, topk_weights, topk_ids, expert_map, *rest)
    return out


def _fused_moe_out(
    out: torch.Tensor,
    x: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    expert_map: torch.Tensor | None,
    *rest: Flat,
) -> None:
    tensors, (facts, kind, parameters, on_input, scaling, backend) = rest[:10], rest[10:]
    arguments = MoEArguments(
        x=x,
        layer=unflatten(tensors, tuple(facts)),  # type: ignore[arg-type]
        topk_weights=topk_weights,
        topk_ids=topk_ids,
        activation=activation_of(kind, parameters),  # type: ignore[arg-type]
        apply_router_weight_on_input=on_input,  # type: ignore[arg-type]
        routed_scaling_factor=scaling,  # type: ignore[arg-type]
        expert_map=expert_map,
        out=out,
    )
    run_checked(arguments, out, backend)  # type: ignore[arg-type]


def is_traced(x: Any, layer: Any) -> bool:
    """Whether a tracer looks on: x is a fake tensor or meta as the layer is, or a dispatch mode is active."""
    if not isinstance(x, torch.Tensor) or not isinstance(layer, MarlinMoELayer):
        return False
    plain = type(x) is torch.Tensor or type(x) is torch.nn.Parameter
    on_meta = x.is_meta and layer.device.type == "meta"
    return not plain or on_meta or torch._C._len_torch_dispatch_stack() > 0


def through_dispatcher(
    x: torch.Tensor,
    layer: MarlinMoELayer,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    expert_map: torch.Tensor | None,
    out: torch.Tensor | None,
    options: tuple[str | Activation, bool, float, str | None],
) -> torch.Tensor:
    """The call as one node of a graph: only the layer's own tensors and ints cross."""
    activation, on_input, scaling, backend = options
    check_types(
        x=x,
        layer=layer,
        topk_weights=topk_weights,
        topk_ids=topk_ids,
        expert_map=expert_map,
        out=out,
        apply_router_weight_on_input=on_input,
        routed_scaling_factor=scaling,
    )
    check_type("activation", activation, str, Activation)
    check_type("backend", backend, str, optional=True)
    if isinstance(activation, str):
        kind, parameters = activation, [0.0, 0.0, 0.0, 0.0]
    else:
        kind = activation.kind
        given = (activation.alpha, activation.limit, activation.beta, activation.linear_beta)
        parameters = [0.0 if value is None else value for value in given]
    flat = layer.flat
    mapped = layer.expert_map if expert_map is None else expert_map
    rest = (*flat.tensors, list(flat.facts), kind, parameters, on_input, float(scaling), backend)
    if out is None:
        result: torch.Tensor = torch.ops.marlin_moe.fused_moe(x, topk_weights, topk_ids, mapped, *rest)
        return result
    torch.ops.marlin_moe.fused_moe_out(out, x, topk_weights, topk_ids, mapped, *rest)
    return out


def activation_of(kind: str, parameters: list[float]) -> Activation:
    """The activation of its flat form: the four parameters, 0 where it has its default or none."""
    given = {name: value for name, value in zip(PARAMETERS, parameters, strict=True) if value}
    return Activation(kind, **given)


def _like_x(x: torch.Tensor, *_: Flat) -> torch.Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _nothing(*_: Flat) -> None:
    return None


for _device in ("CPU", "CUDA"):
    library.impl("fused_moe", _fused_moe, _device)
    library.impl("fused_moe_out", _fused_moe_out, _device)
torch.library.register_fake("marlin_moe::fused_moe", _like_x, lib=library)
torch.library.register_fake("marlin_moe::fused_moe_out", _nothing, lib=library)
