"""A layer as flat tensors and ints, which is all that crosses into a registered op, and back.

The op gets the layer's own tensors, so the layer is found again by the address of its weights; where torch
gave it copies (a traced program that runs elsewhere), a layer is made of them.
"""

import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from .matrix import MarlinMatrix, QuantFormat

if TYPE_CHECKING:
    from .layer import MarlinMoELayer

TENSORS = ("qweight", "scales", "zero_points", "sort_order", "bias")
NONE = -1
_layers: "weakref.WeakValueDictionary[tuple[torch.device, int], MarlinMoELayer]" = (
    weakref.WeakValueDictionary()
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FlatLayer:
    """What crosses: ten tensors (those of w13, then w2's; None where absent) and the facts as ints."""

    tensors: tuple[torch.Tensor | None, ...]
    facts: tuple[int, ...]


def flatten(layer: "MarlinMoELayer") -> FlatLayer:
    """The layer's tensors, marked as staying at their addresses, and its facts; it can be found again."""
    tensors = tuple(getattr(matrix, name) for matrix in (layer.w13, layer.w2) for name in TENSORS)
    if layer.device.type == "cuda":
        for tensor in tensors:
            if tensor is not None:  # else cudagraph trees copy the weights before every replay
                torch._dynamo.mark_static_address(tensor, guard=False)
    _layers[layer.device, layer.w13.qweight.data_ptr()] = layer
    facts = (
        *_format_facts(layer.w13.format),
        *_format_facts(layer.w2.format),
        layer.num_global_experts,
        layer.intermediate_size,
        int(layer.gated),
        layer.max_tokens,
        NONE if layer.top_k is None else layer.top_k,
    )
    return FlatLayer(tensors=tensors, facts=facts)


def unflatten(tensors: tuple[torch.Tensor | None, ...], facts: tuple[int, ...]) -> "MarlinMoELayer":
    """The layer that was flattened, or an equal one made of the tensors."""
    from .layer import MarlinMoELayer

    qweight = tensors[0]
    if qweight is None:
        raise TypeError("w13_qweight: expected a tensor, got None.")
    found = _layers.get((qweight.device, qweight.data_ptr()))
    if found is not None and found.flat.facts == facts:
        return found
    num_global_experts, intermediate_size, gated, max_tokens, top_k = facts[6:]
    return MarlinMoELayer(
        w13=_matrix(tensors[:5], facts[:3]),
        w2=_matrix(tensors[5:], facts[3:6]),
        num_global_experts=num_global_experts,
        intermediate_size=intermediate_size,
        gated=bool(gated),
        max_tokens=max_tokens,
        top_k=None if top_k == NONE else top_k,
    ).with_workspace()


def _format_facts(form: QuantFormat) -> tuple[int, int, int]:
    return form.bits, NONE if form.group_size is None else form.group_size, int(form.symmetric)


def _matrix(tensors: tuple[torch.Tensor | None, ...], facts: tuple[int, ...]) -> MarlinMatrix:
    bits, group_size, symmetric = facts
    named = dict(zip(TENSORS, tensors, strict=True))
    form = QuantFormat(
        bits=bits, group_size=None if group_size == NONE else group_size, symmetric=bool(symmetric)
    )
    return MarlinMatrix(format=form, **named)  # type: ignore[arg-type]
