"""The buffers of each backend, on a device."""

import torch

from ..device import architecture, reason_against_kernels
from . import cuda_moe, reference
from .buffers import WorkspacePlan
from .problem import LayerFacts


def plan_workspace(backend: str, facts: LayerFacts, device: torch.device, *, rows: int) -> WorkspacePlan:
    """The buffers that a backend needs for `rows` rows of a layer on a device."""
    if backend == "cuda":
        sms = torch.cuda.get_device_properties(device).multi_processor_count
        blocks = cuda_moe.BLOCKS_PER_SM * sms
        return cuda_moe.plan_workspace(facts, rows=rows, blocks=blocks, arch=architecture(device))
    return reference.plan_workspace(facts, rows=rows)


def usual_backend(facts: LayerFacts, device: torch.device) -> str:
    """The backend that runs a layer's calls where x has the dtype of its scales."""
    fitting = device.type == "cuda" and facts.scales_dtype in (torch.bfloat16, torch.float16)
    return "cuda" if fitting and reason_against_kernels(device) is None else "reference"
