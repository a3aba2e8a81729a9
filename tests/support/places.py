"""Where a test body runs: a device, a backend, and the sizes that suit it.

    plain                            the reference backend on a CPU, the CUDA backend on a GPU
    TRITON_INTERPRET=1               the Triton backend in its interpreter, on a CPU
    MARLIN_MOE_TEST_BACKEND=triton   the Triton backend on a GPU, as where marlin-moe[cuda] is missing

The last two are for a whole process: test_on_triton.py starts them.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace

import pytest
import torch

from marlin_moe.kernels import device
from marlin_moe.kernels.device import triton_is_interpreted
from marlin_moe.kernels.plan import paths
from marlin_moe.kernels.plan.paths import Path, RowRange
from marlin_moe.kernels.plan.problem import LayerFacts
from moe_cases import MoECase

TOKENS = (0, 1, 2, 3, 5, 8, 17, 33, 64, 100, 513, 4097)
BACKEND = "MARLIN_MOE_TEST_BACKEND"


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A device with one of its backends, the path that all rows take, and sizes of the full cross there.

    `dtypes` is what a case's dtype becomes where the place does not have it, `most_tokens` bounds all cases.
    """

    device: str
    backend: str
    path: Path | None = None
    tokens: tuple[int, ...] = (0, 1, 5, 33)
    num_experts: int = 3
    hidden_size: int = 256
    padded_intermediate_size: int = 256
    dtypes: dict[torch.dtype, torch.dtype] = field(default_factory=dict, hash=False)
    most_tokens: int = 2**31

    def takes(self, case: MoECase) -> MoECase:
        """The case as it runs here."""
        dtype = self.dtypes.get(case.dtype, case.dtype)
        return replace(case, dtype=dtype, tokens=min(case.tokens, self.most_tokens))

    def __str__(self) -> str:
        return f"{self.backend} on {self.device}" + (f", {self.path}" if self.path else "")


CPU = Place(device="cpu", backend="reference")
GPU = Place(device="cuda", backend="cuda", tokens=TOKENS, num_experts=16, hidden_size=512)
GENERAL = replace(GPU, path=Path.GENERAL, tokens=(0, 1, 8, 33, 100, 513))
"""The path that few layers take on Hopper, and most on other devices."""
INTERPRETER = Place(
    device="cpu",
    backend="triton",
    tokens=(0, 1, 33),
    most_tokens=20,
    hidden_size=128,
    padded_intermediate_size=128,
    dtypes={torch.bfloat16: torch.float32},  # the interpreters of triton 3.6 and 3.7.1 compute bf16 wrongly
)


def places() -> list[Place]:
    """Those of this process."""
    if triton_is_interpreted():
        return [INTERPRETER]
    return [replace(GPU, backend="triton")] if on_triton() else [CPU, GPU, GENERAL]


def force_path(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    """All rows of every layer take the path."""

    def all_ranges(facts: LayerFacts, arch: str) -> tuple[RowRange, ...]:
        return (RowRange(path=path, first=1, last=None),)

    monkeypatch.setattr(paths, "_all_ranges", all_ranges)


def on_triton() -> bool:
    """Whether layers on a GPU are to run through the Triton backend by themselves."""
    return os.environ.get(BACKEND) == "triton"


def hide_cuda_compiler() -> None:
    """What a machine without marlin-moe[cuda] has: its GPU layers run through Triton."""
    device.has_compiler = lambda: False  # type: ignore[assignment]
