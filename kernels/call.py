"""A call on a backend: `run_checked`, and on CUDA `ReadyCall`, which repeats one that was checked before."""

from dataclasses import dataclass
from typing import Any

import torch

from .activation import Activation
from .arguments import MoEArguments
from .backends.choose import BACKENDS, choose_backend
from .backends.cuda_arguments import PARAMETERS
from .backends.cuda_moe import (
    VECTOR_BYTES,
    fixed_numbers,
    has_vector_rows,
    matrices_of,
    prepared,
)
from .device import architecture
from .jit.launch import PreparedLaunch
from .matrix import MarlinMatrix
from .plan.cuda_moe import choose_variant
from .scratch import Lease
from .workspace import Workspace

MOST_CALLS = 4096
"""Calls that a layer remembers: one for each number of tokens and set of options."""


def run_checked(arguments: MoEArguments, out: torch.Tensor, backend: str | None) -> str:
    """Write the layer's output into `out`; the name of the backend that did."""
    problem = arguments.problem()
    chosen = choose_backend(problem, backend)
    rows = problem.tokens * problem.top_k
    if rows:
        workspace = arguments.workspace()
        with torch.no_grad(), workspace.lease(top_k=problem.top_k, backend=chosen, rows=rows) as lease:
            BACKENDS[chosen].run(arguments, out, lease)
    return chosen


def remembered(
    calls: "dict[Any, ReadyCall]",
    x: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    expert_map: torch.Tensor | None,
    options: tuple[str | Activation, bool, float, str | None],
    matrices: tuple[MarlinMatrix, MarlinMatrix],
) -> "tuple[tuple[Any, ...] | None, ReadyCall | None]":
    """(key, call made ready under it): None where there is none.

    The key is what decides whether a call on CUDA is right and how it runs, but for addresses and gradients:
    types too, since 1 == True == 1.0. Arguments that have no key are none that the op takes, and the checks
    of `MoEArguments` say which.
    """
    tensors = (x, topk_weights, topk_ids) if expert_map is None else (x, topk_weights, topk_ids, expert_map)
    try:
        facts = [(t.shape, t.stride(), t.dtype, t.device, t.is_neg()) for t in tensors]
        key = (*facts, options, type(options[1]), type(options[2]), matrices)
        return key, calls.get(key)
    except (AttributeError, TypeError, RuntimeError):  # no tensor; no hash; a layout without strides
        return None, None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadyCall:
    """A call that was checked and ran in one launch: another with an equal key only needs its addresses.

    Attributes:
        launch: the kernel with its grid.
        matrices: the layer's addresses, which never move.
        numbers: the parameters behind the addresses.
        top_k: slots per token.
        device_index: the device that has to be the current one.
    """

    launch: PreparedLaunch
    matrices: tuple[int, ...]
    numbers: tuple[int | float, ...]
    top_k: int
    device_index: int

    @classmethod
    def remember(cls, arguments: MoEArguments, key: tuple[Any, ...]) -> None:
        """Keep the call that just ran on the CUDA backend, unless it takes more than one launch."""
        x, ids, weights = arguments.x, arguments.topk_ids, arguments.topk_weights
        workspace = arguments.workspace()
        if not ids.numel() or torch.cuda.is_current_stream_capturing():
            return
        plain = all(
            tensor is None or (tensor.is_contiguous() and not tensor.is_neg())
            for tensor in (ids, weights, arguments.expert_map)
        )
        bound = workspace.bound("cuda", top_k=ids.shape[1])
        if not plain or ids.numel() > bound.plan.rows or not has_vector_rows(x):
            return
        variant = choose_variant(workspace.facts, rows=ids.numel(), arch=architecture(x.device))
        if len(workspace.calls) >= MOST_CALLS:
            workspace.calls.clear()
        workspace.calls[key] = cls(
            launch=prepared(variant, workspace.facts.num_experts, ids.numel(), x.device),
            matrices=matrices_of(arguments.layer),
            numbers=(*ids.shape, *fixed_numbers(arguments, variant, rows=ids.numel())),
            top_k=ids.shape[1],
            device_index=x.device.index,
        )

    def fits(self, x: torch.Tensor, topk_weights: torch.Tensor) -> bool:
        """Whether the addresses and gradients are such that nothing has to be checked again."""
        wants_gradient = torch.is_grad_enabled() and (x.requires_grad or topk_weights.requires_grad)
        return (
            not wants_gradient
            and x.data_ptr() % VECTOR_BYTES == 0
            and torch._C._cuda_getDevice() == self.device_index
        )

    def run(
        self,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        expert_map: torch.Tensor | None,
        workspace: Workspace,
    ) -> torch.Tensor:
        """A new tensor with the layer's output for x."""
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        if torch._C._cuda_isCurrentStreamCapturing():
            self._launch(
                out, x, topk_weights, topk_ids, expert_map, workspace.captured("cuda", topk_ids.numel())
            )
            return out
        lease = workspace.bound("cuda", top_k=self.top_k)
        with lease.scratch.lock:
            self._launch(out, x, topk_weights, topk_ids, expert_map, lease)
        return out

    def _launch(
        self,
        out: torch.Tensor,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        expert_map: torch.Tensor | None,
        lease: Lease,
    ) -> None:
        tokens, top_k, *fixed = self.numbers
        parameters = PARAMETERS.pack(
            x.data_ptr(),
            topk_weights.data_ptr(),
            topk_ids.data_ptr(),
            0 if expert_map is None else expert_map.data_ptr(),
            *self.matrices,
            out.data_ptr(),
            *lease.addresses,
            x.stride(0),
            out.stride(0),
            tokens,
            top_k,
            *fixed,
        )
        self.launch(torch._C._cuda_getCurrentRawStream(self.device_index), parameters)
