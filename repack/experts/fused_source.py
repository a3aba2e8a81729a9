"""Tensors of numbered experts, read out of 3-D tensors: `FusedSource`."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import torch

from .fused import FusedLayout, FusedTensor
from .spellings import Spelling


class PartSource(Protocol):
    """Where parts of tensors are read from."""

    @property
    def fills_any_device(self) -> bool:
        """Whether parts are read into tensors of any device; else contiguous CPU tensors."""

    def read_part_into(self, name: str, start: int, out: torch.Tensor) -> None:
        """Fill `out` with the elements of tensor `name` from `start` on, counted over all of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedSource:
    """`TensorSource` of a fused module: names as of numbered experts, read from the 3-D tensors.

    Attributes:
        prefix: the module's name and a dot.
        layout: its 3-D tensors.
        spelling: the names under which its experts are seen.
        source: reads parts of the 3-D tensors by their full names.
    """

    prefix: str
    layout: FusedLayout
    spelling: Spelling
    source: PartSource

    @property
    def fills_any_device(self) -> bool:
        """As the source of the 3-D tensors."""
        return self.source.fills_any_device

    def read_into(self, name: str, out: torch.Tensor) -> None:
        """Fill `out` with the tensor `<module>.<expert>.<projection>.<field>`."""
        tensor, expert, role = self.find(name.removeprefix(self.prefix))
        key = self.prefix + tensor.key
        if not tensor.transposed:
            self.source.read_part_into(key, tensor.stretch(expert, role)[0], out)
            return
        whole = torch.Size(tensor.shape[1:])
        part = torch.empty(whole, dtype=out.dtype, device=out.device if self.fills_any_device else "cpu")
        self.source.read_part_into(key, expert * whole.numel(), part)
        out.copy_(tensor.view(part, role))

    def read_all(self, wanted: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Fill the tensors one after another, experts together."""
        for name, out in wanted:
            self.read_into(name, out)

    def find(self, key: str) -> tuple[FusedTensor, int, str]:
        """(3-D tensor, expert, role) of a key below the module, as numbered experts have it."""
        expert, projection, field = key.split(".")
        role = {name: role for role, name in self.spelling.roles}[projection]
        tensor = self.layout.find(role, field)
        if tensor is None:
            raise KeyError(key)
        return tensor, int(expert), role
