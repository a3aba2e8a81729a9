"""The ways in which a model's experts are run side by side, put into the same loaded model.

A variant is an experts implementation of transformers, chosen by name for the whole model:

    persistent    as `load_model` gives it: the workspace of the layers of a stream, kept
    per-call      the same op with a workspace that every call allocates and zeroes, of the call's size
    reference     the same layers through the reference backend
    dequantized   the experts as plain weights in the model's dtype, run by transformers itself
"""

import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from ..integrations.transformers import expert_layers
from ..kernels.fused_marlin_moe import fused_marlin_moe
from .zeroed_workspace import ZeroedWorkspace

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ..integrations.hf_experts import MarlinExperts

VARIANTS = ("persistent", "per-call", "reference", "dequantized")
EXPERTS_AT_ONCE = 8


def per_call_forward(
    self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """[M, H] with a workspace of the call's own."""
    layer = self.per_call_layer
    layer.workspace.rows = min(top_k_index.numel(), layer.max_tokens * top_k_index.shape[1])
    return fused_marlin_moe(hidden_states, layer, top_k_weights, top_k_index, activation=self.activation)


def reference_forward(
    self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """[M, H] through the reference backend."""
    return fused_marlin_moe(
        hidden_states,
        self.layer,
        top_k_weights,
        top_k_index,
        activation=self.activation,
        backend="reference",
    )


def put_variant(model: "PreTrainedModel", name: str) -> str | None:
    """Make a model of `load_model` run its experts as variant `name`, or say why it cannot.

    "dequantized" cannot be taken back: it is the last one.
    """
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    from ..integrations.hf_experts import IMPLEMENTATION

    if name == "dequantized":
        reason = _no_room(model)
        if reason is None:
            _dequantize_experts(model)
            run_experts_as(model, "grouped_mm")
        return reason
    forward = {"per-call": per_call_forward, "reference": reference_forward}.get(name)
    implementation = IMPLEMENTATION if forward is None else f"{IMPLEMENTATION}_{name}"
    if forward is not None:
        ALL_EXPERTS_FUNCTIONS.register(implementation, forward)
    for _, module in _marlin_modules(model):
        layer = module.layer
        if name == "per-call":
            layer = replace(layer, workspace=ZeroedWorkspace.attach(layer))
        module.__dict__["per_call_layer"] = layer  # no module, no tensor
    run_experts_as(model, implementation)
    return None


def run_experts_as(model: "PreTrainedModel", implementation: str) -> None:
    """Choose an experts implementation of transformers, by its name.

    A model of several parts (language, vision) has no experts of its own, and may refuse what a part takes.
    """
    parts = [part for part in model.get_experts_implementation() if part]
    model.set_experts_implementation(dict.fromkeys(parts, implementation) or implementation)


def _marlin_modules(model: torch.nn.Module) -> "list[tuple[str, MarlinExperts]]":
    from ..integrations.hf_experts import MarlinExperts

    return [(name, module) for name, module in model.named_modules() if isinstance(module, MarlinExperts)]


def _no_room(model: "PreTrainedModel") -> str | None:
    """Why the experts' plain weights do not fit; None where they do, with a tenth to spare."""
    layers = list(expert_layers(model).values())
    dense = sum(3 * x.num_experts * x.intermediate_size * x.hidden_size for x in layers)
    needed = int(1.1 * dense * model.dtype.itemsize) - sum(layer.nbytes for layer in layers)
    free = free_bytes(model.device)
    if needed <= free:
        return None
    return f"needs {needed / 1e9:.1f} GB more, {free / 1e9:.1f} GB are free"


def free_bytes(device: torch.device) -> int:
    """Bytes that can still be allocated on a device, cached ones of torch among them."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _dequantize_experts(model: "PreTrainedModel") -> None:
    """Put the model's own experts modules back, filled with the layers' values; layer after layer."""
    with torch.device("meta"):
        skeleton = type(model)(model.config)
    for name, module in _marlin_modules(model):
        plain, layer = skeleton.get_submodule(name), module.layer
        for key in ("gate_up_proj", "down_proj"):
            empty = torch.empty(plain.get_parameter(key).shape, dtype=model.dtype, device=layer.device)
            setattr(plain, key, torch.nn.Parameter(empty, requires_grad=False))
        for start in range(0, layer.num_experts, EXPERTS_AT_ONCE):
            chosen = list(range(start, min(start + EXPERTS_AT_ONCE, layer.num_experts)))
            gate_up, down = layer.dequantize(chosen)
            plain.get_parameter("gate_up_proj")[chosen] = gate_up.to(model.dtype)
            plain.get_parameter("down_proj")[chosen] = down.to(model.dtype)
        plain.config = module.config
        model.set_submodule(name, plain.eval())
