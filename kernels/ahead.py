"""Compiling before the first call asks for it: `compile_for`, which `reserve` calls."""

from collections.abc import Iterable

import torch

from .device import architecture, reason_against_kernels
from .plan.cuda_moe import possible_variants
from .plan.problem import LayerFacts


def compile_for(layers: Iterable[tuple[LayerFacts, int]], device: torch.device) -> None:
    """Compile and load on a CUDA device what calls of layers can choose there, of up to so many rows each.

    Does nothing where the CUDA backend does not run: on other devices, older ones, or without its compiler.

    Args:
        layers: facts of each, and the most rows that a pass of its calls has.
        device: where they are.

    Raises:
        JitError: a kernel did not compile; or MARLIN_MOE_JIT forbids it and the cache has none.
    """
    if device.type != "cuda":
        return
    from .backends import cuda_moe  # it imports the layer, and the layer the workspace
    from .jit.build import compiling_is_forbidden

    wanted = list(layers)
    if not wanted or reason_against_kernels(device) is not None:
        return
    arch = architecture(device)
    if not compiling_is_forbidden():
        cuda_moe.compile_ahead(wanted, arch)
    chosen = dict.fromkeys(
        (variant, facts.num_experts)
        for facts, rows in wanted
        for variant in possible_variants(facts, rows, arch)
    )
    for variant, num_experts in chosen:
        cuda_moe.load_ahead(variant, num_experts, device)
