"""What is constant in every CUDA kernel of a layer: `KernelVariant`, a layer's formats and a token tile."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import torch

from .problem import LayerFacts, MatrixFacts

CHUNK_K = 256
COLUMNS = 128  # of a tile's sums


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelVariant(ABC):
    """One binary: everything that is a constant in it. Groups of 0 are one scale per column."""

    source: ClassVar[str]
    kernel: ClassVar[str]
    blocks_per_sm: ClassVar[int]
    waits_for_kernel_before: ClassVar[bool] = False  # itself, from sm_90 on: its blocks may come earlier

    fp16: bool
    w13_bits: int
    w13_group: int
    w13_symmetric: bool
    w13_sorted: bool
    w2_bits: int
    w2_group: int
    w2_symmetric: bool
    gated: bool
    token_tile: int

    @property
    def constants(self) -> dict[str, int | bool]:
        """The constants by their names in the source."""
        return {field.name.upper(): getattr(self, field.name) for field in fields(self)}

    @property
    def label(self) -> str:
        """What people call it: `moe fp16 w4g128-w8g0z tile 8`; z is asymmetric, s act-order."""
        matrices = (
            f"w{bits}g{group}{'' if symmetric else 'z'}{'s' if ordered else ''}"
            for bits, group, symmetric, ordered in (
                (self.w13_bits, self.w13_group, self.w13_symmetric, self.w13_sorted),
                (self.w2_bits, self.w2_group, self.w2_symmetric, False),
            )
        )
        kind = "" if self.gated else " ungated"
        dtype = "fp16" if self.fp16 else "bf16"
        return f"{self.kernel} {dtype} {'-'.join(matrices)}{kind} tile {self.token_tile}"

    @property
    @abstractmethod
    def threads(self) -> int:
        """Of a block."""

    @abstractmethod
    def smem_bytes(self, *, num_experts: int, slots: int) -> int:
        """Dynamic shared memory of a block, for calls of up to `slots` slots."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MoEVariant(KernelVariant):
    """A binary of the general path, `cuda/moe.cu`: any number of rows."""

    source: ClassVar[str] = "moe.cu"
    kernel: ClassVar[str] = "moe"
    blocks_per_sm: ClassVar[int] = 2

    @property
    def threads(self) -> int:
        """Of a block."""
        return 256

    def smem_bytes(self, *, num_experts: int, slots: int) -> int:
        """The counts, two chunks of tokens, or a tile's sums; the same for any number of slots."""
        tokens = 2 * self.token_tile * (CHUNK_K + 8) * 2
        sums = COLUMNS * (self.token_tile + 1) * 4
        parts = COLUMNS * self.token_tile * 4
        return max(tokens, sums, parts, 4 * num_experts)


def form_of(facts: LayerFacts) -> dict[str, Any]:
    """The fields of a variant that a layer decides."""
    return {
        "fp16": facts.scales_dtype == torch.float16,
        "w13_bits": facts.w13.bits,
        "w13_group": _group(facts.w13),
        "w13_symmetric": not facts.w13.zero_points,
        "w13_sorted": facts.w13.sort_order,
        "w2_bits": facts.w2.bits,
        "w2_group": _group(facts.w2),
        "w2_symmetric": not facts.w2.zero_points,
        "gated": facts.gated,
    }


def _group(matrix: MatrixFacts) -> int:
    return 0 if matrix.num_groups == 1 else matrix.size_k // matrix.num_groups
