"""Tensors of numbered experts, read out of 3-D tensors: `FusedSource`."""

from dataclasses import dataclass
from typing import Protocol

import torch

from .fused import FusedLayout, FusedTensor
from .spellings import Spelling


class PartSource(Protocol):
    """Where parts of tensors are read from."""

    fills_any_device: bool

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
        expert, projection, field = name.removeprefix(self.prefix).split(".")
        role = {self.spelling.gate: "gate", self.spelling.up: "up", self.spelling.down: "down"}[projection]
        tensor = self.layout.find(role, field)
        if tensor is None:
            raise KeyError(name)
        self._read(tensor, int(expert), role, out)

    def _read(self, tensor: FusedTensor, expert: int, role: str, out: torch.Tensor) -> None:
        whole = torch.Size(tensor.shape[1:])
        start = expert * whole.numel()
        if not tensor.transposed:
            start += tensor.roles.index(role) * out.numel()
            self.source.read_part_into(self.prefix + tensor.key, start, out)
            return
        part = torch.empty(whole, dtype=out.dtype, device=out.device if self.fills_any_device else "cpu")
        self.source.read_part_into(self.prefix + tensor.key, start, part)
        out.copy_(tensor.view(part, role))
