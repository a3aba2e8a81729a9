"""A pass over tokens on CUDA, ready but for its tensors: `CudaPass`, whose kernels share their arguments."""

import struct
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ..scratch import Lease


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaPass(ABC):
    """The launches over at most so many tokens of a call: calling it adds the addresses and launches.

    The arguments are packed once, whatever the number of launches; only what a kernel is told beyond them is
    added for it.

    Attributes:
        layout: of the arguments in C++.
        scratch: the pointers into the scratch, of the addresses of a lease's buffers.
        matrices: the layer's addresses, which never move.
        numbers: what stands behind the number of tokens.
    """

    layout: struct.Struct
    scratch: Callable[[dict[str, int]], tuple[int, ...]]
    matrices: tuple[int, ...]
    numbers: tuple[int | float, ...]

    def __call__(
        self,
        stream: int,
        lease: Lease,
        tokens: int,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        expert_map: torch.Tensor | None,
        out: torch.Tensor,
    ) -> None:
        """Launch on a stream of the current device, which is the tensors'; `tokens` are x's rows."""
        parameters = self.layout.pack(
            x.data_ptr(),
            topk_weights.data_ptr(),
            topk_ids.data_ptr(),
            0 if expert_map is None else expert_map.data_ptr(),
            *self.matrices,
            out.data_ptr(),
            *self.scratch(lease.addresses),
            x.stride(0),
            out.stride(0),
            tokens,
            *self.numbers,
        )
        self.launch(stream, parameters, lease, tokens)

    @abstractmethod
    def launch(self, stream: int, parameters: bytes, lease: Lease, tokens: int) -> None:
        """Launch with the packed arguments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OneLaunch(CudaPass):
    """A pass of one kernel: `cuda/moe.cu` or `cuda/decode.cu`."""

    kernel: Callable[[int, bytes], Any]

    def launch(self, stream: int, parameters: bytes, lease: Lease, tokens: int) -> None:
        """Launch it."""
        self.kernel(stream, parameters)
