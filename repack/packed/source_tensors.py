"""The source's tensors of a packed layer, expert by expert: `parts_of`.

A numbered expert has tensors of its own; of a 3-D tensor that holds all experts it has a stretch, the experts
one after another.

    gate_up_proj_packed [E, 2I, words]      | expert 0: gate, up | expert 1: gate, up | …
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from ..experts.fused import FusedTensor
from ..tensor_file import TensorEntry
from .records import LayerRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class SourcePart:
    """What one expert has of a tensor of the source: all of it, or its stretch of a 3-D one.

    Attributes:
        entry: the whole tensor in the source.
        expert: whose part this is.
        roles: the projections (gate, up, down) that it holds, in order.
        field: the last part of the name that each of them has by itself: `weight_packed`, `qweight`.
        fused: how the projections lie side by side, in a 3-D tensor.
    """

    entry: TensorEntry
    expert: int
    roles: tuple[str, ...]
    field: str
    fused: FusedTensor | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Of this part alone."""
        return self.entry.shape if self.fused is None else self.entry.shape[1:]

    @property
    def nbytes(self) -> int:
        """Of this part alone."""
        return self.entry.nbytes if self.fused is None else self.entry.nbytes // self.entry.shape[0]

    @property
    def first_byte(self) -> int:
        """Where it starts within the tensor."""
        return 0 if self.fused is None else self.expert * self.nbytes

    def join(self, projections: list[torch.Tensor]) -> torch.Tensor:
        """The part, made of its projections."""
        return projections[0] if self.fused is None else self.fused.join(projections)


def parts_of(
    layer: LayerRecord, entries: Iterable[TensorEntry]
) -> tuple[dict[int, list[SourcePart]], list[TensorEntry]]:
    """(expert -> its parts of those entries that are the layer's, entries below it that are no expert's)."""
    prefix = f"{layer.module}."
    found: dict[int, list[SourcePart]] = {}
    strange: list[TensorEntry] = []
    for entry in entries:
        if not entry.name.startswith(prefix):
            continue
        parts = _parts(layer, entry, entry.name.removeprefix(prefix))
        for part in parts:
            found.setdefault(part.expert, []).append(part)
        if not parts:
            strange.append(entry)
    return found, strange


def _parts(layer: LayerRecord, entry: TensorEntry, key: str) -> list[SourcePart]:
    numbers = range(layer.facts.num_experts)
    if layer.fused is not None:
        fused = layer.fused.tensors.get(key)
        if fused is None or fused.shape != entry.shape:
            return []
        return [
            SourcePart(entry=entry, expert=number, roles=fused.roles, field=fused.field, fused=fused)
            for number in numbers
        ]
    number, _, rest = key.partition(".")
    projection, _, field = rest.partition(".")
    role = {name: role for role, name in layer.spelling.roles}.get(projection)
    if not number.isdecimal() or int(number) not in numbers or role is None or not field:
        return []
    return [SourcePart(entry=entry, expert=int(number), roles=(role,), field=field)]
