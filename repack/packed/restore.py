"""Checkpoint layout of a packed block -> the tensors that the source had, byte for byte.

`RestoredBlock` undoes act-order and gives each tensor, or an expert's part of a 3-D one, as the quantization
tool stores it. What did not flow through the stages is rebuilt: `weight_shape` is (N, K), g_idx follows from
the stored orders, the zero points of symmetric GPTQ are all the middle.
"""

from collections.abc import Collection, Iterator, Mapping

import torch

from ...kernels.layout import pack_fields, unpack_fields
from ..blocks import block_memory, blocks
from ..errors import ExpertsError, PackedError
from ..quant_methods.method import PackedForm
from ..quant_methods.table import METHODS
from ..staging import HostMemory
from ..states import ExpertFacts, ExpertTensors
from .invert import Inverted, inverted, read_packed
from .records import LayerRecord
from .source_tensors import SourcePart


class RestoredBlock:
    """A block of experts of a packed layer in the source's own order."""

    def __init__(self, layer: LayerRecord, block: range, content: Inverted) -> None:
        self.layer = layer
        self.block = block
        self.padding = content.padding
        self.fields = source_order(content.fields, layer.facts)

    def tensor(self, part: SourcePart) -> torch.Tensor:
        """What the source stores of one expert of this block.

        Raises:
            PackedError: a tensor that the packed layer does not hold, of another shape, or of values that the
                source could not have stored.
        """
        tensor = part.join([self._projection(part, role) for role in part.roles])
        if tuple(tensor.shape) != part.shape:
            raise PackedError(
                f"{part.entry.name}: expected {part.shape} of expert {part.expert} as in the source's "
                f"header, got {tuple(tensor.shape)}."
            )
        return tensor.to(part.entry.torch_dtype).contiguous()

    def _projection(self, part: SourcePart, role: str) -> torch.Tensor:
        """One field of gate, up or down, as the source's tool stores it by itself."""
        facts, scheme = self.layer.facts, self.layer.scheme
        method = METHODS[scheme.quant_method]
        size_n, size_k = facts.intermediate_size, facts.hidden_size
        matrix, form, weights = "w13", facts.w13, scheme.w13
        if role == "down":
            size_n, size_k = size_k, size_n
            matrix, form, weights = "w2", facts.w2, scheme.w2
        fields = {field.name: field for field in method.fields(weights, size_n=size_n, size_k=size_k)}
        field = fields.get(part.field)
        name = None if field is None or field.becomes is None else f"{matrix}_{field.becomes}"
        if field is None or (name is not None and name not in self.fields):
            raise PackedError(
                f"{part.entry.name}: expected a tensor that the packed layer holds, got no {part.field}."
            )
        canonical = None
        if name is not None:
            canonical = self.fields[name][part.expert - self.block.start]
            if matrix == "w13" and field.becomes != "weight_g_idx":
                canonical = canonical.chunk(facts.halves)[facts.halves - 1 if role == "up" else 0]
        packed = PackedForm(scheme=weights, bits=form.bits, size_n=size_n, size_k=size_k)
        try:
            return method.stored(field, canonical, packed)
        except ExpertsError as error:
            raise PackedError(f"{part.entry.name.rpartition('.')[0]}.{error}") from error


def restored_blocks(
    packed: ExpertTensors, layer: LayerRecord, experts: Collection[int], *, block_bytes: int
) -> Iterator[RestoredBlock]:
    """The given experts of a layer, block after block under a byte budget, each read over the one before."""
    memory: HostMemory | None = None
    for stretch in stretches(experts):
        for block in blocks(packed, stretch, block_bytes=block_bytes):
            memory = memory or block_memory(packed, block)
            memory.clear()
            tensors = read_packed(packed, block, torch.device("cpu"), staging=memory)
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
