"""Where a test body runs: a device, a backend, and the sizes that suit it."""

from __future__ import annotations

from dataclasses import dataclass

from marlin_moe.kernels.plan.paths import Path

TOKENS = (0, 1, 2, 3, 5, 8, 17, 33, 64, 100, 513, 4097)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A device with one of its backends, the path that all rows take, and sizes of the full cross there."""

    device: str
    backend: str
    path: Path | None = None
    tokens: tuple[int, ...] = (0, 1, 5, 33)
    num_experts: int = 3
    hidden_size: int = 256
    padded_intermediate_size: int = 256

    def __str__(self) -> str:
        return f"{self.backend} on {self.device}" + (f", {self.path}" if self.path else "")
