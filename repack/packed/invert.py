"""Marlin tensors of a packed layer (TP = 1, padded) -> checkpoint layout, unpadded, K as it is sorted.

The exact inverse of the stages pad .. permute_bias, and none of their code: what `verify` proves rests on it.
`invert` is it as a stage, in place of gather and order, for slices that no cut can give.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ...kernels.layout import (
    pack_fields,
    unpack_fields,
    unpack_zero_points,
    unpermute_bias,
    unpermute_scales,
)
from ..native.repack_weights import unpack_weights
from ..pipeline import Pipeline, Stage, State, both
from ..staging import HostMemory
from ..states import Context, ExpertFacts, ExpertTensors

INVERTED = (
    *both("weight_packed", "weight_scale", "weight_zero_point", "weight_bias"),
    "w13_sort_order",
    "intermediate_order",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Inverted:
    """A block in checkpoint layout: `fields` unpadded, and the `padding` that was cut off, by field."""

    fields: Mapping[str, torch.Tensor]
    padding: Mapping[str, torch.Tensor]


def inverted(tensors: Mapping[str, torch.Tensor], facts: ExpertFacts) -> Inverted:
    """Fields `w13_weight_packed`, … [B, …] of Marlin fields `w13_qweight`, … [B, …]; orders are passed on.

    `padding` holds what was cut off, by Marlin field: zeros in a packed checkpoint that is right.
    """
    fields = {name: tensors[name] for name in ("w13_sort_order", "intermediate_order") if name in tensors}
    padding: dict[str, torch.Tensor] = {}
    size = facts.intermediate_size
    bits = facts.w13.bits
    padded = {
        "w13_weight_packed": unpack_weights(tensors["w13_qweight"], bits=bits),  # [B, R*Ip, words]
        "w13_weight_scale": unpermute_scales(tensors["w13_scales"]),  # [B, R*Ip, G]
    }
    if "w13_bias" in tensors:
        padded["w13_weight_bias"] = unpermute_bias(tensors["w13_bias"])
    for name, tensor in padded.items():
        halves = tensor.reshape(len(tensor), facts.halves, -1, *tensor.shape[2:])
        fields[name] = halves[:, :, :size].flatten(1, 2)
        padding[name] = halves[:, :, size:]
    if "w13_zero_points" in tensors:
        zeros = unpack_zero_points(tensors["w13_zero_points"], bits=bits)  # [B, R*Ip*bits/32, G]
        halves = zeros.reshape(len(zeros), facts.halves, -1, zeros.shape[2])
        words = halves.transpose(2, 3)  # [B, R, G, Ip*bits/32]
        kept, padding["w13_weight_zero_point"] = _first(words, size, bits=bits)
        fields["w13_weight_zero_point"] = kept.transpose(2, 3).flatten(1, 2)
    return _inverted_w2(tensors, facts, fields, padding)


def _inverted_w2(
    tensors: Mapping[str, torch.Tensor],
    facts: ExpertFacts,
    fields: dict[str, torch.Tensor],
    padding: dict[str, torch.Tensor],
) -> Inverted:
    bits, group_size = facts.w2.bits, facts.w2.group_size
    words = unpack_weights(tensors["w2_qweight"], bits=bits)  # [B, H, Ip*bits/32]
    kept, padding["w2_weight_packed"] = _first(words, facts.intermediate_size, bits=bits)
    fields["w2_weight_packed"] = kept
    groups = 1 if group_size is None else facts.intermediate_size // group_size
    grouped = {"w2_weight_scale": unpermute_scales(tensors["w2_scales"])}  # [B, H, Gp]
    if "w2_zero_points" in tensors:
        grouped["w2_weight_zero_point"] = unpack_zero_points(tensors["w2_zero_points"], bits=bits)
    for name, tensor in grouped.items():
        fields[name], padding[name] = tensor[..., :groups].contiguous(), tensor[..., groups:]
    if "w2_bias" in tensors:
        fields["w2_weight_bias"] = unpermute_bias(tensors["w2_bias"])
    return Inverted(fields=fields, padding=padding)


def _first(words: torch.Tensor, count: int, *, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The first `count` fields of packed words [..., W], filled up with zeros, and the values of the rest."""
    per_word = 32 // bits
    whole = -(-count // per_word)
    if whole == words.shape[-1] and count % per_word == 0:
        return words, words[..., whole:]
    spare = unpack_fields(words[..., count // per_word :], bits=bits)[..., count % per_word :]
    if count % per_word == 0:
        return words[..., :whole].contiguous(), spare
    values = unpack_fields(words[..., :whole], bits=bits)
    values[..., count:] = 0
    return pack_fields(values, bits=bits), spare


def read_packed(
    experts: ExpertTensors, block: range, device: torch.device, *, staging: HostMemory | None = None
) -> dict[str, torch.Tensor]:
    """The Marlin fields [B, …] of a block of experts of a packed layer on a device, through `staging`."""
    stem = f"{block[0]}."
    fields = {key.removeprefix(stem): spec for key, spec in experts.shapes.items() if key.startswith(stem)}
    tensors = {}
    for field, (dtype, shape) in fields.items():
        on_meta = device.type == "meta"
        whole = (len(block), *shape)
        if staging is None:
            stacked = torch.empty(whole, dtype=dtype, device="meta" if on_meta else "cpu")
        else:
            stacked = staging.empty(whole, dtype)
        for i, expert in enumerate(() if on_meta else block):
            experts.read_into(f"{expert}.{field}", stacked[i])
        tensors[field] = stacked.to(device, non_blocking=staging is not None)
    return tensors


def _invert(state: State, context: Context) -> State:
    tensors = read_packed(state["expert_tensors"], state.experts, context.device, staging=context.staging)
    fields: dict[str, Any] = dict(inverted(tensors, state.facts).fields)
    return state.evolve(drop=("expert_tensors",), **fields)


invert = Stage(
    name="invert",
    function=_invert,
    reads=("expert_tensors",),
    writes=both("weight_packed", "weight_scale"),
    writes_optional=INVERTED,
    drops=("expert_tensors",),
    reads_files=True,
)


def repack_pipeline() -> Pipeline:
    """Packed experts -> Marlin layer of a rank: invert, then the stages from `shard` on."""
    later = Pipeline.default().starting_with("shard", inputs=INVERTED)
    return Pipeline((invert, *later.stages))
