"""`MoEArguments`: the arguments of one call, checked against the layer and each other."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from .activation import Activation
from .checks import check_type
from .errors import OpError
from .flat import TENSORS
from .layer import MarlinMoELayer
from .overlap import first_overlap
from .plan.problem import MoEProblem
from .workspace import Workspace

X_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
ID_DTYPES = (torch.int32, torch.int64)
LAYER_TENSORS = tuple(f"layer.{matrix}.{name}" for matrix in ("w13", "w2") for name in TENSORS)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MoEArguments:
    """What `fused_marlin_moe` was called with; its docstring describes the fields.

    `expert_map` is the layer's own where the call gave none, `out` None where the result is to be allocated.

    Raises:
        TypeError: an argument of a wrong Python type.
        OpError: a tensor or number that does not fit, by name, with what was expected and found.
    """

    x: torch.Tensor
    layer: MarlinMoELayer
    topk_weights: torch.Tensor
    topk_ids: torch.Tensor
    activation: Activation
    apply_router_weight_on_input: bool
    routed_scaling_factor: float
    expert_map: torch.Tensor | None
    out: torch.Tensor | None

    def __post_init__(self) -> None:
        check_types(
            x=self.x,
            layer=self.layer,
            topk_weights=self.topk_weights,
            topk_ids=self.topk_ids,
            expert_map=self.expert_map,
            out=self.out,
            apply_router_weight_on_input=self.apply_router_weight_on_input,
            routed_scaling_factor=self.routed_scaling_factor,
        )
        self.workspace()
        self._check_x()
        self._check_routing()
        self._check_expert_map()
        self._check_options()
        if self.out is not None:
            self._check_out(self.out)

    def workspace(self) -> Workspace:
        """The layer's workspace."""
        workspace, device = self.layer.workspace, self.layer.device
        if workspace is None or workspace.device != device:
            raise OpError(
                f"layer: expected a workspace on {device}, where its tensors are, got "
                f"{'none' if workspace is None else workspace.device}. Call layer.with_workspace(), or end "
                "the pipeline with the stage attach_workspace."
            )
        return workspace

    def problem(self) -> MoEProblem:
        """The call without its tensors."""
        return MoEProblem(
            layer=self.workspace().facts,
            tokens=self.x.shape[0],
            top_k=self.topk_ids.shape[1],
            x_dtype=self.x.dtype,
            device_type=self.x.device.type,
            activation=self.activation.kind,
            apply_router_weight_on_input=self.apply_router_weight_on_input,
            expert_map=self.expert_map is not None,
        )

    def _check_x(self) -> None:
        size = self.layer.hidden_size
        if self.x.dtype not in X_DTYPES or self.x.dim() != 2 or self.x.shape[1] != size:
            raise OpError(
                f"x: expected bfloat16, float16 or float32 [M, {size}], because the layer's H is {size}, "
                f"got {_describe(self.x)}."
            )
        self._check_place("x", self.x)
        for name in ("x", "topk_weights"):
            if torch.is_grad_enabled() and getattr(self, name).requires_grad:
                raise OpError(
                    f"{name}: expected no gradient, because the op has no backward, got requires_grad=True. "
                    "Call it under torch.no_grad() or torch.inference_mode(), or detach the tensor."
                )

    def _check_routing(self) -> None:
        ids, weights, tokens = self.topk_ids, self.topk_weights, self.x.shape[0]
        if ids.dtype not in ID_DTYPES or ids.dim() != 2 or ids.shape[0] != tokens or ids.shape[1] < 1:
            raise OpError(
                f"topk_ids: expected int32 or int64 [M={tokens}, T] with T >= 1, because x is "
                f"{_describe(self.x)}, got {_describe(ids)}."
            )
        allowed = dict.fromkeys((torch.float32, self.x.dtype))
        if weights.dtype not in allowed or weights.shape != ids.shape:
            raise OpError(
                f"topk_weights: expected {' or '.join(map(_name, allowed))} {tuple(ids.shape)} as topk_ids, "
                f"got {_describe(weights)}."
            )
        self._check_place("topk_ids", ids)
        self._check_place("topk_weights", weights)
        count = self.layer.num_global_experts
        _check_values(
            "topk_ids", ids, count, f"router ids are global: the layer has {count} experts over all ranks"
        )

    def _check_expert_map(self) -> None:
        if self.expert_map is None:
            return
        count, local = self.layer.num_global_experts, self.layer.num_experts
        if self.expert_map.dtype != torch.int32 or tuple(self.expert_map.shape) != (count,):
            raise OpError(
                f"expert_map: expected int32 [{count}], one local index or -1 for each global expert, "
                f"got {_describe(self.expert_map)}."
            )
        self._check_place("expert_map", self.expert_map)
        _check_values("expert_map", self.expert_map, local, f"the layer holds {local} experts")

    def _check_options(self) -> None:
        if self.activation.gated != self.layer.gated:
            halves = "a gate and an up half" if self.layer.gated else "no gate"
            raise OpError(
                f"activation: expected {'a gated' if self.layer.gated else 'an ungated'} kind, because the "
                f"layer's w13 has {halves}, got {self.activation.kind}."
            )
        try:
            finite = math.isfinite(self.routed_scaling_factor)
        except OverflowError:  # an int beyond the floats, which may have too many digits to print
            raise OpError("routed_scaling_factor: expected a finite number, got a larger integer.") from None
        if not finite:
            raise OpError(
                f"routed_scaling_factor: expected a finite number, got {self.routed_scaling_factor}."
            )

    def _check_out(self, out: torch.Tensor) -> None:
        if out.dtype != self.x.dtype or out.shape != self.x.shape:
            raise OpError(f"out: expected {_describe(self.x)} as x is, got {_describe(out)}.")
        self._check_place("out", out)
        rows, width = out.shape
        if out.stride(1) != 1 or (rows > 1 and out.stride(0) < width):
            raise OpError(
                f"out: expected contiguous rows (stride 1 along H, at least H={width} between rows), "
                f"got strides {out.stride()}. Give a contiguous tensor, or leave out=None."
            )
        if out.is_neg():
            raise OpError(
                "out: expected a tensor whose bytes are its values, because kernels write those, got a view "
                "that is negated lazily. Give another tensor, or leave out=None."
            )
        name = first_overlap(out, self._tensors_read())
        if name is not None:
            raise OpError(
                f"out: expected memory of its own, because rows are written while {name} is still read, "
                f"got memory that overlaps {name}. Give another tensor, or leave out=None."
            )

    def _tensors_read(self) -> Iterator[tuple[str, torch.Tensor | None]]:
        """(name, tensor) of all that a call must leave as it is."""
        yield "x", self.x
        yield "topk_weights", self.topk_weights
        yield "topk_ids", self.topk_ids
        yield "expert_map", self.expert_map
        yield from zip(LAYER_TENSORS, self.layer.flat.tensors, strict=True)
        yield "layer.expert_map", self.layer.expert_map
        yield "layer.intermediate_order", self.layer.intermediate_order

    def _check_place(self, name: str, tensor: torch.Tensor) -> None:
        if tensor.device != self.layer.device:
            raise OpError(
                f"{name}: expected on {self.layer.device}, where the layer is, got {tensor.device}. "
                "Move the tensor, or the layer with layer.to(device)."
            )
        if tensor.layout != torch.strided:
            raise OpError(f"{name}: expected a dense tensor, got {tensor.layout}. Give tensor.to_dense().")


def check_types(
    *,
    x: object,
    layer: object,
    topk_weights: object,
    topk_ids: object,
    expert_map: object,
    out: object,
    apply_router_weight_on_input: object,
    routed_scaling_factor: object,
) -> None:
    """Raise TypeError for the first of the op's arguments that is of a wrong Python type."""
    check_type("layer", layer, MarlinMoELayer)
    check_type("x", x, torch.Tensor)
    check_type("topk_weights", topk_weights, torch.Tensor)
    check_type("topk_ids", topk_ids, torch.Tensor)
    check_type("expert_map", expert_map, torch.Tensor, optional=True)
    check_type("out", out, torch.Tensor, optional=True)
    check_type("apply_router_weight_on_input", apply_router_weight_on_input, bool)
    check_type("routed_scaling_factor", routed_scaling_factor, int, float)


def _check_values(name: str, values: torch.Tensor, count: int, why: str) -> None:
    """Raise OpError unless all are in -1 .. count - 1.

    On a CPU only: elsewhere it would wait for the device, and what is out of range adds nothing.
    """
    if values.device.type != "cpu" or values.numel() == 0:
        return
    low, high = values.aminmax()
    if low >= -1 and high < count:
        return
    place = ((values < -1) | (values >= count)).nonzero()[0].tolist()
    raise OpError(
        f"{name}: expected -1 (adds nothing) or 0 .. {count - 1}, because {why}, "
        f"got {values[tuple(place)].item()} at {place}."
    )


def _describe(tensor: torch.Tensor) -> str:
    return f"{_name(tensor.dtype)} {tuple(tensor.shape)}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
