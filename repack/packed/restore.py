"""Checkpoint layout of a packed block -> the tensors that the source had, byte for byte.

`RestoredBlock` undoes act-order and takes single tensors by the source's names. What is metadata in the
source is
rebuilt: `weight_shape` is (N, K), `weight_g_idx` follows from the stored orders.
"""

from collections.abc import Collection, Iterator, Mapping

import torch

from ...kernels.layout import pack_fields, unpack_fields
from ..blocks import blocks
from ..errors import PackedError
from ..states import ExpertFacts
from ..tensor_file import TensorEntry
from .invert import Inverted, inverted, read_packed
from .reader import PackedCheckpoint
from .records import LayerRecord

FIELDS = {
    "weight_packed": "weight_packed",
    "weight_scale": "weight_scale",
    "weight_zero_point": "weight_zero_point",
    "weight_g_idx": "weight_g_idx",
    "bias": "weight_bias",
}
"""Last part of a name in compressed-tensors' checkpoints -> the stages' field."""


class RestoredBlock:
    """A block of experts of a packed layer in the source's own order.

    Raises:
        PackedError: the source is of a tool whose tensors cannot be restored.
    """

    def __init__(self, layer: LayerRecord, block: range, content: Inverted) -> None:
        check_restorable(layer)
        self.layer = layer
        self.block = block
        self.padding = content.padding
        self.fields = source_order(content.fields, layer.facts)

    def tensor(self, entry: TensorEntry) -> torch.Tensor:
        """The tensor that the source has at `entry`, as stored there; PackedError where there is none."""
        expert, projection, name = self.split(entry.name)
        i = expert - self.block.start
        facts, spelling = self.layer.facts, self.layer.spelling
        matrix = "w2" if projection == spelling.down else "w13"
        size = (facts.hidden_size, facts.intermediate_size)
        if name == "weight_shape":
            tensor = torch.tensor(size if matrix == "w2" else size[::-1])
        elif (field := f"{matrix}_{FIELDS.get(name)}") in self.fields:
            tensor = self.fields[field][i]
            if matrix == "w13" and name != "weight_g_idx":
                half = facts.halves - 1 if projection == spelling.up else 0
                tensor = tensor.chunk(facts.halves)[half]
        else:
            raise PackedError(f"{entry.name}: expected a tensor that the packed layer holds, got no {name}.")
        if tuple(tensor.shape) != entry.shape:
            raise PackedError(
                f"{entry.name}: expected {entry.shape} as in the source's header, got {tuple(tensor.shape)}."
            )
        return tensor.to(entry.torch_dtype).contiguous()

    def split(self, name: str) -> tuple[int, str, str]:
        """(expert, projection, field) of a name below the layer's module."""
        expert, projection, field = name.removeprefix(f"{self.layer.module}.").split(".")
        return int(expert), projection, field


def restored_blocks(
    packed: PackedCheckpoint, layer: LayerRecord, experts: Collection[int], *, block_bytes: int
) -> Iterator[RestoredBlock]:
    """The given experts of a layer, block after block under a byte budget."""
    source = packed.experts(layer)
    for stretch in stretches(experts):
        for block in blocks(source, stretch, block_bytes=block_bytes):
            tensors = read_packed(source, block, torch.device("cpu"))
            yield RestoredBlock(layer, block, inverted(tensors, layer.facts))


def stretches(numbers: Collection[int]) -> list[range]:
    """Runs of consecutive numbers: {0, 1, 2, 5} -> [0 .. 2], [5 .. 5]."""
    found: list[range] = []
    for number in sorted(set(numbers)):
        if found and found[-1].stop == number:
            found[-1] = range(found[-1].start, number + 1)
        else:
            found.append(range(number, number + 1))
    return found


def expert_of(layer: LayerRecord, name: str) -> int:
    """The expert that a tensor of the layer belongs to."""
    return int(name.removeprefix(f"{layer.module}.").partition(".")[0])


def check_restorable(layer: LayerRecord) -> None:
    """Raise PackedError where the source's tensors are not compressed-tensors' own."""
    if layer.scheme.quant_method != "compressed-tensors":
        raise PackedError(
            f"{layer.module}: expected a source of compressed-tensors, whose tensors are restored byte for "
            f"byte, got {layer.scheme.quant_method}."
        )


def source_order(fields: Mapping[str, torch.Tensor], facts: ExpertFacts) -> dict[str, torch.Tensor]:
    """Checkpoint fields with K and the output columns of w13 as in the source, and g_idx [B, K]."""
    out = dict(fields)
    first, second = out.pop("w13_sort_order", None), out.pop("intermediate_order", None)
    for matrix, form, size_k, order in (
        ("w13", facts.w13, facts.hidden_size, first),
        ("w2", facts.w2, facts.intermediate_size, second),
    ):
        words = out[f"{matrix}_weight_packed"]
        groups = torch.arange(size_k) // (form.group_size or size_k)
        groups = groups.expand(words.shape[0], -1).contiguous()  # [B, K]
        if order is not None:
            place = order.long()
            groups = torch.empty_like(groups).scatter_(1, place, groups)
            out[f"{matrix}_weight_packed"] = _scatter_inputs(words, place, size_k, bits=form.bits)
        out[f"{matrix}_weight_g_idx"] = groups
    if second is not None:
        _scatter_outputs(out, second.long(), facts)
    return out


def _scatter_inputs(words: torch.Tensor, place: torch.Tensor, size_k: int, *, bits: int) -> torch.Tensor:
    """[B, N, K*bits/32] with column j moved to place[:, j]; spare fields of the last word stay."""
    values = unpack_fields(words, bits=bits)
    index = place[:, None, :].expand(-1, values.shape[1], -1)
    moved = values.clone().scatter_(2, index, values[..., :size_k])
    return pack_fields(moved, bits=bits)


def _scatter_outputs(out: dict[str, torch.Tensor], place: torch.Tensor, facts: ExpertFacts) -> None:
    """Output columns of each half of w13 moved to place [B, I], in every field that has them."""
    for name in ("w13_weight_packed", "w13_weight_scale", "w13_weight_bias"):
        if name in out:
            halves = out[name].reshape(len(place), facts.halves, -1, *out[name].shape[2:])  # [B, R, I, …]
            index = place.view(len(place), 1, -1, *[1] * (halves.dim() - 3)).expand_as(halves)
            out[name] = torch.empty_like(halves).scatter_(2, index, halves).flatten(1, 2)
    if "w13_weight_zero_point" in out:
        bits, size = facts.w13.bits, facts.intermediate_size
        zeros = out["w13_weight_zero_point"]
        words = zeros.reshape(len(zeros), facts.halves, -1, zeros.shape[2]).transpose(2, 3)
        values = unpack_fields(words, bits=bits)  # [B, R, G, I padded to a word]
        index = place[:, None, None, :].expand(-1, *values.shape[1:3], -1)
        moved = values.clone().scatter_(3, index, values[..., :size])
        out["w13_weight_zero_point"] = pack_fields(moved, bits=bits).transpose(2, 3).flatten(1, 2)
