"""The buffers of each backend: backend name -> its planner."""

from collections.abc import Callable

import torch

from . import cuda_moe, reference
from .buffers import WorkspacePlan
from .problem import LayerFacts

PLANNERS: dict[str, Callable[..., WorkspacePlan]] = {
    "cuda": cuda_moe.plan_workspace,
    "reference": reference.plan_workspace,
}
MAX_ROWS = reference.MAX_ROWS


def plan_workspace(backend: str, facts: LayerFacts, *, rows: int) -> WorkspacePlan:
    """The buffers that a backend needs for `rows` rows of a layer."""
    return PLANNERS[backend](facts, rows=rows)


def usual_backend(facts: LayerFacts, device: torch.device) -> str:
    """The backend that runs a layer's calls where x has the dtype of its scales."""
    fitting = device.type == "cuda" and facts.scales_dtype in (torch.bfloat16, torch.float16)
    return "cuda" if fitting else "reference"
