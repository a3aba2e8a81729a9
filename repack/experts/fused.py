"""Experts stored as one 3-D tensor per projection, seen as numbered experts.

    gate_up_proj_packed [E, 2I, H*bits/32]        0.gate_proj.weight_packed [I, H*bits/32]
    gate_up_proj_scale  [E, 2I, G]           ->   0.up_proj.weight_packed   [I, H*bits/32]
    down_proj_packed    [E, H, I*bits/32]         0.down_proj.weight_packed [H, I*bits/32]   …

gate and up may be fused (gate first) or apart, the field's name joined by `_` or as a child
(`gate_up_proj.weight_packed`), and every matrix may be transposed: [E, K*bits/32, N]. The shapes of gate-up
and down together leave no doubt which. What a view shows lies in one piece of the file unless transposed.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from ..errors import ExpertsError
from .spellings import FUSED, FusedSpelling

FIELDS = {
    "packed": "weight_packed",
    "scale": "weight_scale",
    "zero_point": "weight_zero_point",
    "bias": "bias",
}
"""Last part of a joined name -> the field."""

ROLES = ("gate", "up", "down")


class HasShape(Protocol):
    """A tensor, or where one lies."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Its sizes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedTensor:
    """One 3-D tensor of a fused module.

    Attributes:
        key: its name below the module.
        field: `weight_packed`, `weight_scale`, `weight_zero_point` or `bias`.
        roles: the projections side by side in it, in order.
        shape: of the whole.
        transposed: its last two dimensions are swapped.
    """

    key: str
    field: str
    roles: tuple[str, ...]
    shape: tuple[int, ...]
    transposed: bool = False

    @property
    def view_shape(self) -> tuple[int, ...]:
        """The shape of one expert's one projection, as numbered experts have it."""
        inner = self.shape[1:][::-1] if self.transposed else self.shape[1:]
        return (inner[0] // len(self.roles), *inner[1:])

    def view(self, expert: torch.Tensor, role: str) -> torch.Tensor:
        """One projection of one expert's part of the tensor, as numbered experts have it."""
        turned = expert.t() if self.transposed else expert
        size = self.view_shape[0]
        start = self.roles.index(role) * size
        return turned[start : start + size]

    def stretch(self, expert: int, role: str) -> tuple[int, int]:
        """(first element, elements) of one projection of one expert that lie together, over the whole tensor.

        All of it, unless transposed: then its first row of [K, N].
        """
        size = math.prod(self.shape[1:])
        length = self.view_shape[0] if self.transposed else size // len(self.roles)
        return expert * size + self.roles.index(role) * length, length

    def join(self, projections: list[torch.Tensor]) -> torch.Tensor:
        """One expert's part of the tensor of its projections: the inverse of `view`."""
        joined = torch.cat(projections)
        return joined.t().contiguous() if self.transposed else joined


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedLayout:
    """How a module of fused experts is stored: its tensors by key, and how many experts they hold."""

    tensors: Mapping[str, FusedTensor]
    num_experts: int

    def find(self, role: str, field: str) -> FusedTensor | None:
        """The tensor that holds a field of a projection."""
        return next((t for t in self.tensors.values() if t.field == field and role in t.roles), None)

    def key_of(self, role: str, field: str) -> str:
        """The key of the tensor that holds a field of a projection, or would hold it."""
        held, packed = self.find(role, field), self.find(role, "weight_packed")
        if held is not None or packed is None:
            return f"{role}.{field}" if held is None else held.key
        if packed.key.endswith(".weight_packed"):
            return packed.key.removesuffix("weight_packed") + field
        suffix = next((suffix for suffix, named in FIELDS.items() if named == field), field)
        return packed.key.removesuffix("packed") + suffix


def split_key(key: str) -> tuple[str, str] | None:
    """(projection, field) of a key below a module of fused experts, or None."""
    projection, dot, field = key.rpartition(".")
    if dot:
        return (projection, field) if field in FIELDS.values() and "." not in projection else None
    for suffix, named in FIELDS.items():
        if key.endswith(f"_{suffix}"):
            return key[: -len(suffix) - 1], named
    return None


def fused_layout(module: str, shapes: Mapping[str, tuple[int, ...]]) -> FusedLayout | None:
    """The layout of a module's 3-D tensors (key below the module -> shape), or None where it has none.

    Raises:
        ExpertsError: shapes that are of no orientation, or disagree.
    """
    named = {key: parts for key in shapes if (parts := split_key(key)) is not None}
    spelling = _spelling({projection for projection, _ in named.values()})
    if spelling is None or not any(field == "weight_packed" for _, field in named.values()):
        return None
    tensors = {
        key: FusedTensor(key=key, field=field, roles=spelling.roles_of(projection), shape=tuple(shapes[key]))
        for key, (projection, field) in named.items()
        if spelling.roles_of(projection)
    }
    experts = {tensor.shape[0] for tensor in tensors.values() if tensor.shape}
    ranks = {key: t.shape for key, t in tensors.items() if len(t.shape) != (2 if t.field == "bias" else 3)}
    if len(experts) != 1 or ranks:
        found = "; ".join(f"{key} {tensor.shape}" for key, tensor in tensors.items())
        raise ExpertsError(
            f"{module}: expected fused experts as 3-D tensors [E, N, K] of one number of experts E, "
            f"got {found}."
        )
    layout = FusedLayout(tensors=tensors, num_experts=experts.pop())
    return _oriented(module, layout)


def _spelling(projections: Iterable[str]) -> FusedSpelling | None:
    seen = set(projections)
    return next((spelling for spelling in FUSED if spelling.projections <= seen), None)


def _oriented(module: str, layout: FusedLayout) -> FusedLayout:
    """The layout with every tensor's orientation, told by the packed words of up and of down together.

    N of up (or of gate and up) and K of down are the same I, K of up and N of down the same H. With I and H
    at the other ends, no factor of 4 or 8 fits.
    """
    up, down = layout.find("up", "weight_packed"), layout.find("down", "weight_packed")
    absent = [role for role in ROLES if layout.find(role, "weight_packed") is None]
    if absent or up is None or down is None:
        raise ExpertsError(
            f"{module}: expected packed words of gate, up and down, got none of {' and '.join(absent)} among "
            f"{', '.join(layout.tensors)}. A shard is missing; fetch it again."
        )
    fitting = [
        transposed
        for transposed in (False, True)
        if any(_fits(up, down, a, b, transposed=transposed) for a in (4, 8) for b in (4, 8))
    ]
    if len(fitting) != 1:
        raise ExpertsError(
            f"{module}: expected {up.key} [E, {len(up.roles)}*I, H*bits/32] and {down.key} [E, H, I*bits/32] "
            f"or both with their last dimensions swapped, got {up.shape} and {down.shape}."
        )
    turned = fitting[0]
    tensors = {
        key: FusedTensor(
            key=key,
            field=tensor.field,
            roles=tensor.roles,
            shape=tensor.shape,
            transposed=turned and tensor.field != "bias",
        )
        for key, tensor in layout.tensors.items()
    }
    return FusedLayout(tensors=tensors, num_experts=layout.num_experts)


def _fits(up: FusedTensor, down: FusedTensor, up_bits: int, down_bits: int, *, transposed: bool) -> bool:
    up_n, up_words = up.shape[1:][::-1] if transposed else up.shape[1:]
    down_n, down_words = down.shape[1:][::-1] if transposed else down.shape[1:]
    return up_words * 32 // up_bits == down_n and up_n == len(up.roles) * down_words * 32 // down_bits
