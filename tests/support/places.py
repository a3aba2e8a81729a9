"""Where a test body runs: a device, a backend, and the sizes that suit it."""

from __future__ import annotations

from dataclasses import dataclass

TOKENS = (0, 1, 2, 3, 5, 8, 17, 33, 64, 100, 513, 4097)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A device with one of its backends, and the sizes of the full cross there."""

    device: str
    backend: str
    tokens: tuple[int, ...] = (0, 1, 5, 33)
    num_experts: int = 3
    hidden_size: int = 256
    padded_intermediate_size: int = 256

    def __str__(self) -> str:
        return f"{self.backend} on {self.device}"
