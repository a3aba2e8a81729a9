"""A rank's slice of a packed layer, where it is a pure cut: no value is unpacked.

    I = 256, TP 2, rank 1
    w13.qweight  [E, H/16, gate 0..255 | up 0..255]  ->  [E, H/16, gate 128..255 | up 128..255]
    w2.qweight   [E, rows 0..255 / 16, ..]           ->  [E, rows 128..255 / 16, ..]

A slice is a cut when it starts and ends on 64 columns (which are also whole 16-row tiles and whole words),
or ends where I ends: there the padding is the rank's own. Scales of w2 go by groups, repeated where a group
is cut, and into the order of single scales where the rank has one group.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import cast

import torch

from ...kernels.layout import TILE_K, TILE_N, order_columns, restore_columns
from ..stages.permute_scales import cast as to_dtype
from ..states import Context, ExpertFacts, ExpertTensors, State
from .reader import PackedSource

CONVERTED = ("w13_scales", "w2_scales", "w13_bias", "w2_bias")
"""Fields in the dtype that is asked for."""


def is_cut(facts: ExpertFacts, context: Context) -> bool:
    """Whether the context's slice of the intermediate size is a cut of the packed tensors."""
    start, stop = context.tp.bounds(facts.intermediate_size)
    return start % TILE_N == 0 and (stop % TILE_N == 0 or stop == facts.intermediate_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """Cuts blocks of experts of a packed layer for one rank.

    Attributes:
        experts: the packed layer.
        facts: of the source; `result`: of the rank's layer.
        context: the rank.
    """

    experts: ExpertTensors
    facts: ExpertFacts
    result: ExpertFacts
    context: Context

    def fill(self, name: str, block: range, slot: torch.Tensor) -> None:
        """`slot` [B, …] with the rank's part of field `name` of a block of experts."""
        source = cast(PackedSource, self.experts.source)
        if self._is_whole(name):
            self._fill_whole(source, name, block, slot)
        elif name == "w2_qweight":
            row = self.context.tp.bounds(self.facts.intermediate_size)[0] // TILE_K
            rows = slot if slot.device.type == "cpu" else torch.empty_like(slot, device="cpu")
            source.read_experts(name, block.start, rows, skip_rows=row)
            if rows is not slot:
                slot.copy_(rows)
        elif name == "w13_qweight":
            slot.copy_(self._columns(source.mapped(name, block), slot.shape[-1]))
        else:
            slot.copy_(self._converted(name, self._piece(name, self._read(source, name, block), slot), block))

    def mapped(self, experts: range, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """Those fields that a layer on a CPU can have as they lie in the file: no byte is copied."""
        if self.context.device.type != "cpu":
            return {}
        source = cast(PackedSource, self.experts.source)
        dtype = self.context.dtype or self.facts.scales_dtype
        return {
            name: source.mapped(name, experts)
            for name in names
            if self._is_whole(name) and (name not in CONVERTED or dtype == self.facts.scales_dtype)
        }

    def _is_whole(self, name: str) -> bool:
        """Every rank has all of it: without TP all tensors, else what only H and w13's K index."""
        return self.context.tp.size == 1 or name == "w13_sort_order"

    def _fill_whole(self, source: PackedSource, name: str, block: range, slot: torch.Tensor) -> None:
        dtype, _ = self.experts.shapes[f"0.{name}"]
        if slot.device.type == "cpu" and slot.dtype == dtype:
            source.read_experts(name, block.start, slot)
        else:
            slot.copy_(self._converted(name, self._read(source, name, block), block))

    def _read(self, source: PackedSource, name: str, block: range) -> torch.Tensor:
        dtype, shape = self.experts.shapes[f"0.{name}"]
        whole = torch.empty((len(block), *shape), dtype=dtype, device="cpu")
        source.read_experts(name, block.start, whole)
        return whole

    def _piece(self, name: str, whole: torch.Tensor, slot: torch.Tensor) -> torch.Tensor:
        """The rank's part of a small field [B, …], in the source's dtype."""
        start, stop = self.context.tp.bounds(self.facts.intermediate_size)
        if name == "intermediate_order":
            return whole[:, start:stop]
        if name == "w2_bias":
            return whole if self.context.tp.rank == 0 else torch.zeros_like(whole)  # added once
        if name.startswith("w13_"):
            return self._columns(whole, slot.shape[-1])
        groups = whole[:, self._groups(start, slot.shape[1])]  # [B, G, N or words]
        single = name == "w2_scales" and whole.shape[1] > 1 and slot.shape[1] == 1
        return order_columns(restore_columns(groups, grouped=True), grouped=False) if single else groups

    def _columns(self, whole: torch.Tensor, length: int) -> torch.Tensor:
        """[..., length]: the rank's columns of each half of w13; 64 columns lie together in every field."""
        halves = self.facts.halves
        start, _ = self.context.tp.bounds(self.facts.intermediate_size)
        split = whole.reshape(*whole.shape[:-1], halves, -1)
        padded = -(-self.facts.intermediate_size // TILE_N) * TILE_N
        first = start * split.shape[-1] // padded
        columns = split[..., first : first + length // halves]
        return columns.reshape(*whole.shape[:-1], length)

    def _groups(self, start: int, count: int) -> torch.Tensor:
        """The packed groups of w2 that the rank's `count` groups are."""
        source, own = self.facts.w2.group_size, self.result.w2.group_size
        if source is None or own is None:
            return torch.zeros(count, dtype=torch.int64, device="cpu")
        return (start + torch.arange(count, device="cpu") * own) // source

    def _converted(self, name: str, tensor: torch.Tensor, block: range) -> torch.Tensor:
        if name not in CONVERTED:
            return tensor
        dtype = self.context.dtype or self.facts.scales_dtype
        return to_dtype(tensor, dtype, State(experts=block, facts=self.facts, fields={}), self.context, name)
