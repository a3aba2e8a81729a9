"""Compiling before the first call asks for it: `compile_for`, which `reserve` calls."""

from collections.abc import Iterable

import torch

from .device import architecture, reason_against_kernels
from .plan.cuda_moe import variants
from .plan.problem import LayerFacts


def compile_for(facts: Iterable[LayerFacts], device: torch.device) -> None:
    """Compile and load on a CUDA device all kernels that these layers' calls can choose there.

    Does nothing where the CUDA backend does not run: on other devices, older ones, or without its compiler.

    Raises:
        JitError: a kernel did not compile; or MARLIN_MOE_JIT forbids it and the cache has none.
    """
    if device.type != "cuda":
        return
    from .backends import cuda_moe  # it imports the layer, and the layer the workspace
    from .jit.build import compiling_is_forbidden

    wanted = list(dict.fromkeys(facts))
    if not wanted or reason_against_kernels(device) is not None:
        return
    if not compiling_is_forbidden():
        cuda_moe.compile_ahead(wanted, device)
        return
    for layer in wanted:
        for variant in variants(layer, architecture(device)):
            cuda_moe.prepared(variant, layer.num_experts, 1, device)
