"""The module that stands where a transformers model keeps its experts, and its experts implementation.

transformers sends the forward of an experts module through a table of implementations, by the name in
`config._experts_implementation` (`ALL_EXPERTS_FUNCTIONS` in `transformers.integrations.moe`). "marlin_moe" is
ours: it runs the op. Router, normalization, scaling and shared experts stay the model's own.
"""

from typing import Any

import torch
from transformers.integrations.moe import (
    ALL_EXPERTS_FUNCTIONS,
    grouped_mm_experts_forward,
    use_experts_implementation,
)

from ..kernels.activation import Activation
from ..kernels.fused_marlin_moe import fused_marlin_moe
from ..kernels.layer import MarlinMoELayer
from .errors import ModelError

IMPLEMENTATION = "marlin_moe"
CANDIDATES = ("silu", "gelu", "gelu_tanh")
SAMPLES = 97


def marlin_moe_experts_forward(
    self: torch.nn.Module, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """[M, H] of tokens [M, H], expert numbers and weights [M, T]: the implementation called "marlin_moe".

    Experts that the checkpoint keeps as plain weights have no layer; they run as transformers runs them.
    """
    if not isinstance(self, MarlinExperts):
        plain: torch.Tensor = grouped_mm_experts_forward(self, hidden_states, top_k_index, top_k_weights)
        return plain
    if top_k_weights.dtype not in (torch.float32, hidden_states.dtype):  # autocast rounds the router alone
        top_k_weights = top_k_weights.float()
    return fused_marlin_moe(hidden_states, self.layer, top_k_weights, top_k_index, activation=self.activation)


@use_experts_implementation
class MarlinExperts(torch.nn.Module):
    """A model's experts, held by a `MarlinMoELayer`; it has no parameters and no state dict of its own.

    Attributes:
        config: the model's; its `_experts_implementation` says how the forward runs.
        layer: the experts.
        activation: between the two GEMMs.
        loaded: the model is whole. Until then transformers asks it for its names through its state dict.
    """

    def __init__(self, config: Any, layer: MarlinMoELayer, activation: Activation) -> None:
        super().__init__()
        self.config = config
        self.layer = layer
        self.activation = activation
        self.loaded = False

    @property
    def num_experts(self) -> int:
        """Experts that the router chooses from."""
        return self.layer.num_global_experts

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """[M, H] of tokens [M, H], expert numbers and weights [M, T]."""
        return marlin_moe_experts_forward(self, hidden_states, top_k_index, top_k_weights)

    @property
    def gate_up_proj(self) -> torch.Tensor:
        """What other implementations ask for."""
        raise ModelError(
            f"{self.layer.recipe.module}: expected the experts implementation {IMPLEMENTATION!r}, because "
            "the weights are packed for it, got one that wants gate_up_proj "
            f"({self.config._experts_implementation!r}). "
            f"Call model.set_experts_implementation({IMPLEMENTATION!r})."
        )

    def _apply(self, fn: Any, recurse: bool = True) -> "MarlinExperts":
        """Follow the model to another device; a CUDA layer cannot follow it to another dtype."""
        layer = self.layer
        moved = fn(torch.empty(0, dtype=layer.scales_dtype, device=layer.device))
        if moved.device.type == "cuda" and moved.dtype != layer.scales_dtype:
            raise ModelError(
                f"{layer.recipe.module}: expected activations to stay {layer.scales_dtype}, because scales "
                f"of that dtype were packed, got a conversion to {moved.dtype}. Load again with dtype=."
            )
        if moved.device != layer.device:
            self.layer = layer.to(moved.device)
        return self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """Refuse: a state dict without the experts would look like the whole model."""
        if self.loaded:
            raise ModelError(
                f"{prefix}state_dict: expected a module with parameters, got experts packed in the Marlin "
                "layout, which a state dict does not hold. The checkpoint is what to keep; parameters() has "
                "everything else."
            )

    def extra_repr(self) -> str:
        """Sizes and format."""
        layer = self.layer
        bits = f"{layer.w13.format.bits}/{layer.w2.format.bits}"
        return (
            f"{layer.num_experts} experts, hidden_size={layer.hidden_size}, "
            f"intermediate_size={layer.intermediate_size}, bits={bits}, activation={self.activation.kind}"
        )


ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, marlin_moe_experts_forward)


def activation_of(experts: torch.nn.Module, name: str) -> Activation:
    """The activation that an experts module of transformers applies, found by trying it on values.

    So a module that overrides the gate (limits, offsets) is seen, whatever its config says.

    Raises:
        ModelError: one that the op does not have, or gate and up in turns.
    """
    wide = torch.linspace(-12, 12, SAMPLES, device="cpu", dtype=torch.float64)
    gate, up = wide.repeat_interleave(SAMPLES), wide.repeat(SAMPLES)
    apply_gate = getattr(experts, "_apply_gate", None)
    if callable(apply_gate) and experts.has_gate and experts.is_concatenated:
        value = apply_gate(torch.stack([gate, up], dim=1))[:, 0]
        for kind in CANDIDATES:
            if torch.allclose(value, Activation(kind).apply(gate, up), rtol=1e-9, atol=1e-9):
                return Activation(kind)
    raise ModelError(
        f"{name}: expected experts that apply {', '.join(CANDIDATES)} to gate (first) and up, which the op "
        f"runs, got another formula in {type(experts).__name__}."
    )
