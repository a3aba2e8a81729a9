"""`MarlinMoELayer`, what the op runs: two Marlin matrices, facts, and a persistent workspace."""

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch

from .checks import check_type, expert_indices, has_values, is_permutation
from .device import usable_device
from .errors import LayerError
from .flat import FlatLayer, flatten
from .matrix import MarlinMatrix, QuantFormat
from .workspace import Workspace

__all__ = ["MarlinMatrix", "MarlinMoELayer", "QuantFormat", "Shard"]


@dataclass(frozen=True, slots=True)
class Shard:
    """Rank `rank` of `size`: a slice of the intermediate size (TP) or of the experts (EP)."""

    rank: int
    size: int

    def __post_init__(self) -> None:
        for name in ("rank", "size"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool):
                raise TypeError(f"Shard.{name}: expected an int, got {type(value).__name__} {value!r}.")
        if self.size < 1 or not 0 <= self.rank < self.size:
            raise LayerError(
                f"Shard: expected 0 <= rank < size, got rank {self.rank} of {self.size}. Ranks count from 0."
            )

    def bounds(self, length: int) -> tuple[int, int]:
        """[start, stop) of this rank's contiguous part of `length` items: rank * length // size onwards."""
        return self.rank * length // self.size, (self.rank + 1) * length // self.size


WHOLE = Shard(0, 1)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, weakref_slot=True)
class MarlinMoELayer:
    """A routed-experts layer of one rank, ready for `fused_marlin_moe`. No nn.Module.

    Letters: E experts of this rank, H hidden size, I this rank's intermediate size, Ip the same padded to 64.

    Attributes:
        w13: gate and up stacked along N: K = H, N = 2*Ip, [gate; up], each half padded alone (N = Ip if
            ungated).
        w2: down: K = Ip, N = H.
        num_global_experts: experts that router ids count, over all EP ranks.
        intermediate_size: I, unpadded.
        gated: w13 has a gate and an up half.
        expert_map: int32 [num_global_experts] -> local index or -1, or None when ids are local already.
        intermediate_order: int32 [E, I]: the source's intermediate column at each position, where act-order
            of w2 was folded into w13's columns; else None.
        tp, ep: which part of the source this layer is.
        top_k: experts per token that the checkpoint's config names, or None.
        max_tokens: tokens that one pass over the workspace takes; more run in chunks.
        workspace: the persistent scratch (`workspace`), shared with other layers of the device; None only
            until the pipeline's last stage.
        recipe: how the layer was made, for `update_weights_`; opaque to the op.
        flat: the layer as tensors and ints, for the registered op.

    Raises:
        TypeError: a part of another Python type.
        LayerError: parts that do not fit together; all problems in one text.
    """

    w13: MarlinMatrix
    w2: MarlinMatrix
    num_global_experts: int
    intermediate_size: int
    gated: bool = True
    expert_map: torch.Tensor | None = None
    intermediate_order: torch.Tensor | None = None
    tp: Shard = WHOLE
    ep: Shard = WHOLE
    top_k: int | None = None
    max_tokens: int = 8192
    workspace: Workspace | None = None
    recipe: Any = None
    flat: FlatLayer = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._check_types()
        problems = list(self._problems())
        if not problems and self.workspace is None:  # a layer that only gets its workspace was looked at
            problems = list(self._value_problems())
        if problems:
            raise LayerError("\n".join(problems))
        object.__setattr__(self, "flat", flatten(self))

    @classmethod
    def from_marlin(
        cls,
        *,
        w13_qweight: torch.Tensor,
        w13_scales: torch.Tensor,
        w2_qweight: torch.Tensor,
        w2_scales: torch.Tensor,
        bits: int,
        group_size: int | None,
        symmetric: bool,
        w13_zero_points: torch.Tensor | None = None,
        w2_zero_points: torch.Tensor | None = None,
        w13_bias: torch.Tensor | None = None,
        w2_bias: torch.Tensor | None = None,
        w13_sort_order: torch.Tensor | None = None,
        w2_bits: int | None = None,
        w2_group_size: int | None = None,
        intermediate_size: int | None = None,
        gated: bool = True,
        expert_map: torch.Tensor | None = None,
        top_k: int | None = None,
        max_tokens: int = 8192,
    ) -> "MarlinMoELayer":
        """The layer of tensors that are in the Marlin layout already; they are taken, not copied.

        Args:
            w13_qweight: int32 [E, H/16, 2*Ip*bits/2] (Ip*bits/2 if ungated), [gate; up].
            w13_scales: [E, G, 2*Ip] bf16, fp16 or float32, in Marlin order.
            w2_qweight: int32 [E, Ip/16, H*bits/2].
            w2_scales: [E, G, H].
            bits, group_size, symmetric: the format; group_size None is one scale per column. A matrix that
                is no longer than its group has one scale per column whatever group_size says.
            w13_zero_points, w2_zero_points: int32 [E, G, N*bits/32], when asymmetric.
            w13_bias, w2_bias: [E, N] in Marlin order.
            w13_sort_order: int32 [E, H]: act-order of w13.
            w2_bits, w2_group_size: where w2's format differs; -1 is one scale per column.
            intermediate_size: I where Ip is padded; Ip by default.
            expert_map: int32 [global experts] -> local index or -1.
            top_k: experts per token, for sizing the workspace; the first call's by default.
            max_tokens: tokens per pass.

        Raises:
            TypeError: an argument of another Python type.
            LayerError: a tensor that does not fit; it names the matrix, the expectation and the finding.
        """
        for name, value in (
            ("w13_qweight", w13_qweight),
            ("w13_scales", w13_scales),
            ("w2_qweight", w2_qweight),
            ("w2_scales", w2_scales),
        ):
            check_type(name, value, torch.Tensor)
        for name, tensor in (
            ("w13_zero_points", w13_zero_points),
            ("w2_zero_points", w2_zero_points),
            ("w13_bias", w13_bias),
            ("w2_bias", w2_bias),
            ("w13_sort_order", w13_sort_order),
            ("expert_map", expert_map),
        ):
            check_type(name, tensor, torch.Tensor, optional=True)
        check_type("bits", bits, int)
        check_type("symmetric", symmetric, bool)
        for name, number in (
            ("group_size", group_size),
            ("w2_bits", w2_bits),
            ("w2_group_size", w2_group_size),
            ("intermediate_size", intermediate_size),
        ):
            check_type(name, number, int, optional=True)
        formats = []
        for name, qweight, size, width in (
            ("w13", w13_qweight, group_size, bits),
            (
                "w2",
                w2_qweight,
                group_size if w2_group_size is None else w2_group_size,
                bits if w2_bits is None else w2_bits,
            ),
        ):
            if qweight.dim() != 3:
                raise LayerError(f"{name}_qweight: expected [E, K/16, N*bits/2], got {tuple(qweight.shape)}.")
            one_group = size is None or size == -1 or size >= qweight.shape[1] * 16
            formats.append(
                QuantFormat(
                    bits=width,
                    group_size=None if one_group else size,
                    symmetric=symmetric,
                )
            )
        w13 = MarlinMatrix(
            qweight=w13_qweight,
            scales=w13_scales,
            zero_points=w13_zero_points,
            sort_order=w13_sort_order,
            bias=w13_bias,
            format=formats[0],
        )
        w2 = MarlinMatrix(
            qweight=w2_qweight,
            scales=w2_scales,
            zero_points=w2_zero_points,
            bias=w2_bias,
            format=formats[1],
        )
        layer = cls(
            w13=w13,
            w2=w2,
            num_global_experts=w13.num_experts if expert_map is None else expert_map.numel(),
            intermediate_size=w2.size_k if intermediate_size is None else intermediate_size,
            gated=gated,
            expert_map=expert_map,
            top_k=top_k,
            max_tokens=max_tokens,
        )
        return layer.with_workspace()

    @property
    def num_experts(self) -> int:
        """E: experts of this rank."""
        return self.w13.num_experts

    @property
    def hidden_size(self) -> int:
        """H."""
        return self.w13.size_k

    @property
    def padded_intermediate_size(self) -> int:
        """Ip: the intermediate size as it lies in memory, a multiple of 64."""
        return self.w2.size_k

    @property
    def device(self) -> torch.device:
        """The device of all tensors."""
        return self.w13.device

    @property
    def scales_dtype(self) -> torch.dtype:
        """dtype of w13's scales: the activations' on the CUDA backends."""
        return self.w13.scales.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of all weights and tables, without the workspace."""
        return sum(tensor.nbytes for _, tensor in self.tensors())

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(dotted name, tensor) of every tensor of the layer, e.g. `w13.qweight`."""
        for name, matrix in (("w13", self.w13), ("w2", self.w2)):
            for part, tensor in matrix.tensors():
                yield f"{name}.{part}", tensor
        for name in ("expert_map", "intermediate_order"):
            if getattr(self, name) is not None:
                yield name, getattr(self, name)

    def with_workspace(self) -> "MarlinMoELayer":
        """The same layer with a workspace attached: registers its plan with the device, allocates nothing."""
        return replace(self, workspace=Workspace.attach(self))

    def to(self, device: torch.device | str | int) -> "MarlinMoELayer":
        """A new layer on `device`, with that device's workspace; MarlinMoEError where there is none."""
        target = usable_device(device)
        moved: dict[str, Any] = {
            name: None if (tensor := getattr(self, name)) is None else tensor.to(target)
            for name in ("expert_map", "intermediate_order")
        }
        layer = replace(
            self,
            w13=self.w13.to(target),
            w2=self.w2.to(target),
            workspace=None,
            **moved,
        )
        return layer.with_workspace()

    def dequantize(
        self, experts: torch.Tensor | list[int] | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(w13 float32 [n, 2I, H] as [gate; up], w2 float32 [n, H, I]): exactly the source's values.

        Padding and ordering are undone. A TP rank of an act-order layer gives its intermediate columns in
        sorted order, which `intermediate_order` names. `experts` are local indices; all by default.

        Raises:
            TypeError: `experts` are no integers.
            LayerError: an index outside 0 .. E-1.
        """
        chosen = expert_indices(range(self.num_experts) if experts is None else experts, self.num_experts)
        chosen = chosen.to(self.device)
        size, padded = self.intermediate_size, self.padded_intermediate_size
        w13 = self.w13.dequantize(chosen)  # [n, 2Ip, H]
        halves = w13.unflatten(1, (-1, padded))[:, :, :size]  # [n, 2, I, H]
        w2 = self.w2.dequantize(chosen)[:, :, :size]  # [n, H, I]
        if self.intermediate_order is not None and self.tp.size == 1:
            place = torch.argsort(self.intermediate_order[chosen].long(), dim=1)  # [n, I]
            halves = halves.gather(2, place[:, None, :, None].expand_as(halves))
            w2 = w2.gather(2, place[:, None, :].expand_as(w2))
        return halves.flatten(1, 2), w2.contiguous()

    def update_(self, other: "MarlinMoELayer") -> "MarlinMoELayer":
        """Copy a finished layer of equal shapes and facts into this one's storage: every data_ptr() stays.

        Raises:
            TypeError: `other` is no layer.
            LayerError: the layers differ in a fact, shape, dtype or in what is present; nothing was written.
        """
        problems = self.update_problems(other)
        if problems:
            raise LayerError("update_: the layers differ, nothing was written.\n" + "\n".join(problems))
        mine, theirs = dict(self.tensors()), dict(other.tensors())
        made_in_it = any(tensor.is_inference() for tensor in mine.values())
        with torch.inference_mode() if made_in_it else nullcontext():  # only there such may be written
            for name, tensor in mine.items():
                tensor.copy_(theirs[name])
        return self

    def update_problems(self, other: "MarlinMoELayer") -> list[str]:
        """What keeps `other`, also one on meta, from being copied into this layer: a line each, or nothing.

        Raises:
            TypeError: `other` is no layer.
        """
        check_type("update_: other", other, MarlinMoELayer)
        mine, theirs = dict(self.tensors()), dict(other.tensors())
        problems = [
            f"{name}: expected {_fact(mine.get(name))} as in the layer updated, got "
            f"{_fact(theirs.get(name))}."
            for name in mine.keys() | theirs.keys()
            if _fact(mine.get(name)) != _fact(theirs.get(name))
        ]
        for name in ("num_global_experts", "intermediate_size", "gated", "tp", "ep"):
            if getattr(self, name) != getattr(other, name):
                problems.append(f"{name}: expected {getattr(self, name)}, got {getattr(other, name)}.")
        for name in ("w13", "w2"):
            if (want := getattr(self, name).format) != (got := getattr(other, name).format):
                problems.append(f"{name}: expected {want}, got {got}.")
        return sorted(problems)

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy is made as any other layer: it is checked, and the registered op finds it."""
        return _layer_of, ({part.name: getattr(self, part.name) for part in fields(self) if part.init},)

    def _check_types(self) -> None:
        for name, kind in (
            ("w13", MarlinMatrix),
            ("w2", MarlinMatrix),
            ("num_global_experts", int),
            ("intermediate_size", int),
            ("gated", bool),
            ("tp", Shard),
            ("ep", Shard),
            ("max_tokens", int),
        ):
            check_type(name, getattr(self, name), kind)
        for name in ("expert_map", "intermediate_order"):
            check_type(name, getattr(self, name), torch.Tensor, optional=True)
        check_type("top_k", self.top_k, int, optional=True)
        check_type("workspace", self.workspace, Workspace, optional=True)

    def _value_problems(self) -> Iterator[str]:
        """What is wrong with the values of index tensors, where they can be looked at."""
        order, local = self.w13.sort_order, self.expert_map
        if order is not None and has_values(order) and not is_permutation(order):
            yield (
                f"w13.sort_order: expected each of 0 .. {self.hidden_size - 1} once in every row, because it "
                "says which source column stands at each position of K, got another one."
            )
        if local is not None and local.numel() and has_values(local):
            low, high = (int(value) for value in torch.aminmax(local))
            if low < -1 or high >= self.num_experts:
                yield (
                    f"expert_map: expected -1 .. {self.num_experts - 1}, because the layer holds "
                    f"{self.num_experts} experts, got {low if low < -1 else high}."
                )

    def _problems(self) -> Iterator[str]:
        e, h, padded = self.num_experts, self.hidden_size, self.padded_intermediate_size
        halves = 2 if self.gated else 1
        if self.w2.num_experts != e or self.w2.size_n != h or self.w13.size_n != halves * padded:
            yield (
                f"w2: expected [E={e}, N=H={h}, K=Ip] with w13's N = {halves} * Ip, got "
                f"E={self.w2.num_experts}, N={self.w2.size_n}, K={padded} beside w13's N={self.w13.size_n}."
            )
        if self.w2.device != self.device:
            yield f"w2: expected on {self.device} as w13 is, got {self.w2.device}."
        if self.w2.scales.dtype != self.scales_dtype:
            yield f"w2.scales: expected {self.scales_dtype} as w13's are, got {self.w2.scales.dtype}."
        if self.w2.sort_order is not None:
            yield "w2.sort_order: expected None, because stage `order` folds w2's order into w13, got one."
        if not padded - 64 < self.intermediate_size <= padded:
            yield (
                f"intermediate_size: expected within ({padded - 64}, {padded}], because w2's K is I padded "
                f"to 64, got {self.intermediate_size}."
            )
        if self.num_global_experts < e:
            yield f"num_global_experts: expected at least the layer's {e}, got {self.num_global_experts}."
        if self.max_tokens < 1:
            yield f"max_tokens: expected at least 1, got {self.max_tokens}."
        if self.top_k is not None and not 1 <= self.top_k <= self.num_global_experts:
            yield f"top_k: expected 1 .. {self.num_global_experts} (the experts), got {self.top_k}."
        for name, shape in (
            ("expert_map", (self.num_global_experts,)),
            ("intermediate_order", (e, self.intermediate_size)),
        ):
            tensor = getattr(self, name)
            if tensor is not None and (tensor.dtype != torch.int32 or tuple(tensor.shape) != shape):
                yield f"{name}: expected int32 {shape}, got {tensor.dtype} {tuple(tensor.shape)}."


def _layer_of(parts: dict[str, Any]) -> MarlinMoELayer:
    return MarlinMoELayer(**parts)


def _fact(tensor: torch.Tensor | None) -> str:
    return "absent" if tensor is None else f"{tensor.dtype} {tuple(tensor.shape)}"
