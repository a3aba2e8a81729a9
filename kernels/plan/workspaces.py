"""The buffers of each backend, on a device."""

import torch

from ..device import architecture, reason_against_kernels, reason_against_triton, triton_is_interpreted
from . import cuda_moe, reference, triton_moe
from .buffers import WorkspacePlan
from .problem import LayerFacts


def plan_workspace(backend: str, facts: LayerFacts, device: torch.device, *, rows: int) -> WorkspacePlan:
    """The buffers that a backend needs for `rows` rows of a layer on a device."""
    match backend:
        case "cuda":
            sms = torch.cuda.get_device_properties(device).multi_processor_count
            blocks = cuda_moe.BLOCKS_PER_SM * sms
            return cuda_moe.plan_workspace(facts, rows=rows, blocks=blocks, arch=architecture(device))
        case "triton":
            return triton_moe.plan_workspace(facts, rows=rows)
        case _:
            return reference.plan_workspace(facts, rows=rows)


def usual_backend(facts: LayerFacts, device: torch.device) -> str:
    """The backend that runs a layer's calls where x has the dtype of its scales."""
    dtype, interpreted = facts.scales_dtype, triton_is_interpreted()
    if device.type == "cuda" and dtype in (torch.bfloat16, torch.float16):
        if reason_against_kernels(device) is None:
            return "cuda"
    elif not (interpreted and device.type == "cpu"):
        return "reference"
    fits = triton_moe.reason_against_dtypes(dtype, dtype, interpreted=interpreted) is None
    return "triton" if fits and reason_against_triton(device) is None else "reference"
