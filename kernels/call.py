"""A call on a backend: `run_checked`, and on CUDA `ReadyCall`, which repeats one that was checked before."""

from dataclasses import dataclass
from typing import Any

import torch

from .activation import Activation
from .arguments import MoEArguments
from .backends.choose import BACKENDS, choose_backend
from .backends.cuda_arguments import VECTOR_BYTES, has_vector_rows
from .backends.cuda_moe import choose_variant, chunk_tokens, ready_pass
from .backends.cuda_pass import CudaPass
from .matrix import MarlinMatrix
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
    """A call that was checked and ran in one pass: another with an equal key only needs its addresses.

    Attributes:
        launch: the pass.
        tokens, top_k: of the call.
        device_index: the device that has to be the current one.
    """

    launch: CudaPass
    tokens: int
    top_k: int
    device_index: int

    @classmethod
    def remember(cls, arguments: MoEArguments, out: torch.Tensor, key: tuple[Any, ...]) -> None:
        """Keep the call that just wrote a new tensor, `out`, on the CUDA backend, if one pass was enough."""
        x, ids, weights = arguments.x, arguments.topk_ids, arguments.topk_weights
        workspace, rows = arguments.workspace(), ids.numel()
        if not rows or torch.cuda.is_current_stream_capturing():
            return
        plain = all(
            tensor is None or (tensor.is_contiguous() and not tensor.is_neg())
            for tensor in (ids, weights, arguments.expert_map)
        )
        tokens, top_k = ids.shape
        bound = workspace.bound("cuda", top_k=top_k)
        if not plain or rows > bound.plan.rows or not has_vector_rows(x):
            return
        variant = choose_variant(arguments, rows=rows)
        if tokens > chunk_tokens(variant, x, top_k, rows=rows):
            return
        if len(workspace.calls) >= MOST_CALLS:
            workspace.calls.clear()
        workspace.calls[key] = cls(
            launch=ready_pass(arguments, out, variant, rows=rows),
            tokens=tokens,
            top_k=top_k,
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
        out = x.new_empty(x.shape)
        stream = torch._C._cuda_getCurrentRawStream(self.device_index)
        rest = (self.tokens, x, topk_weights, topk_ids, expert_map, out)
        if torch._C._cuda_isCurrentStreamCapturing():
            self.launch(stream, workspace.captured("cuda", topk_ids.numel()), *rest)
            return out
        lease = workspace.bound("cuda", top_k=self.top_k)
        with lease.scratch.lock:
            self.launch(stream, lease, *rest)
        return out
