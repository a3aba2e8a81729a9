"""Integers → tensors as the tools store them, and the tensors around the experts."""

from __future__ import annotations

import torch

from checkpoint_spec import NAMINGS, CheckpointSpec
from oracle_layer import Expert, Projection

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # field i of a word is column order[i] of eight


def pack(values: torch.Tensor, bits: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """Unsigned integers [..., C] → int32 [..., C·bits/32], P neighbours in a word, low bits first."""
    per_word = 32 // bits
    fields = values.long().reshape(*values.shape[:-1], -1, per_word)[..., list(order or range(per_word))]
    words = (fields << (torch.arange(per_word) * bits)).sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).int()


def ct_tensors(projection: Projection, spec: CheckpointSpec) -> dict[str, torch.Tensor]:
    """weight_packed [N, K·bits/32], weight_scale [N, G], weight_zero_point [N·bits/32, G], weight_g_idx …"""
    bits = projection.bits
    out = {"weight_packed": pack(projection.values, bits), "weight_scale": projection.scales}
    if projection.zero_points is not None:
        out["weight_zero_point"] = pack(projection.zero_points.T, bits).T
    if projection.g_idx is not None:
        out["weight_g_idx"] = projection.g_idx
    if spec.weight_shape is not None:
        out["weight_shape"] = torch.tensor(projection.values.shape, dtype=spec.weight_shape)
    if projection.bias is not None:
        out["bias"] = projection.bias
    return out


def _zero_points(projection: Projection) -> torch.Tensor:
    if projection.zero_points is not None:
        return projection.zero_points
    return torch.full(projection.scales.shape, 1 << projection.bits - 1, dtype=torch.int32)


def gptq_tensors(projection: Projection, spec: CheckpointSpec) -> dict[str, torch.Tensor]:
    """qweight [K·bits/32, N], qzeros [G, N·bits/32] (v1: zero − 1), scales [G, N], g_idx [K] always."""
    bits, num_k = projection.bits, projection.values.shape[1]
    stored = _zero_points(projection) - int(spec.storage == "gptq")
    trivial = (torch.arange(num_k) // projection.group_size).int()
    out = {
        "qweight": pack(projection.values, bits).T,
        "qzeros": pack(stored.T, bits),
        "scales": projection.scales.T,
        "g_idx": trivial if projection.g_idx is None else projection.g_idx,
    }
    return out if projection.bias is None else out | {"bias": projection.bias}


def awq_tensors(projection: Projection, spec: CheckpointSpec) -> dict[str, torch.Tensor]:
    """qweight [K, N/8] and qzeros [G, N/8], both interleaved, scales [G, N]."""
    out = {
        "qweight": pack(projection.values.T, 4, AWQ_ORDER),
        "qzeros": pack(_zero_points(projection).T, 4, AWQ_ORDER),
        "scales": projection.scales.T,
    }
    return out if projection.bias is None else out | {"bias": projection.bias}


def fused_tensors(experts: list[Expert], module: str, spec: CheckpointSpec) -> dict[str, torch.Tensor]:
    """3-D: gate_up_proj [E, 2I, H·bits/32] with gate's rows before up's, down_proj [E, H, I·bits/32].

    fused-apart has gate_proj and up_proj [E, I, H·bits/32] instead; in fused-transposed the last two
    dimensions are swapped, biases [E, N] aside.
    """
    of_gate = [ct_tensors(e.gate, spec) for e in experts]
    of_up = [ct_tensors(e.up, spec) for e in experts]
    of_down = [ct_tensors(e.down, spec) for e in experts]
    out = {}
    for part in of_gate[0].keys() - {"weight_shape"}:
        named = {"gate_proj": of_gate, "up_proj": of_up, "down_proj": of_down}
        stacked = {name: torch.stack([tensors[part] for tensors in each]) for name, each in named.items()}
        if spec.storage != "fused-apart":
            gate_up = torch.cat([stacked.pop("gate_proj"), stacked.pop("up_proj")], dim=1)
            stacked["gate_up_proj"] = gate_up
        for name, tensor in stacked.items():
            short = part.removeprefix("weight_")
            key = f"{name}.{part}" if spec.storage == "fused-nested" else f"{name}_{short}"
            turned = spec.storage == "fused-transposed" and part != "bias"
            out[f"{module}.{key}"] = tensor.transpose(1, 2) if turned else tensor
    return out


def expert_tensors(experts: list[Expert], module: str, spec: CheckpointSpec) -> dict[str, torch.Tensor]:
    """All tensors of one layer's routed experts."""
    if spec.storage.startswith("fused"):
        return fused_tensors(experts, module, spec)
    store = {"gptq": gptq_tensors, "gptq_v2": gptq_tensors, "awq": awq_tensors}.get(spec.storage, ct_tensors)
    out = {}
    for number, expert in enumerate(experts):
        matrices = (expert.gate, expert.up, expert.down)
        for spelling, projection in zip(NAMINGS[spec.naming][1], matrices, strict=True):
            for part, tensor in store(projection, spec).items():
                out[f"{module}.{number}.{spelling}.{part}"] = tensor
    return out


def surrounding_tensors(spec: CheckpointSpec) -> dict[str, torch.Tensor]:
    """Everything that is no routed, quantized expert, as `spec.extras` says."""
    generator = torch.Generator().manual_seed(spec.seed + 1)
    h, i = spec.hidden_size, spec.intermediate_size
    root = spec.prefix.rsplit(".", 1)[0]
    out: dict[str, torch.Tensor] = {}

    def dense(name: str, *shape: int, dtype: torch.dtype = spec.dtype) -> None:
        out[name] = (torch.randn(shape, generator=generator) * 0.05).to(dtype)

    def mlp(name: str) -> None:
        for spelling, shape in (("gate_proj", (i, h)), ("up_proj", (i, h)), ("down_proj", (h, i))):
            dense(f"{name}.{spelling}.weight", *shape)

    if "embeddings" in spec.extras:
        dense(f"{root}.embed_tokens.weight", 64, h)
        dense("lm_head.weight", 64, h)
    if "norms" in spec.extras:
        dense(f"{root}.norm.weight", h)
    mtp = [spec.num_layers] if "mtp" in spec.extras else []
    for layer in [*range(spec.num_layers), *mtp]:
        name = f"{spec.prefix}.{layer}"
        block = spec.module(layer).rsplit(".", 1)[0]
        if "norms" in spec.extras:
            dense(f"{name}.input_layernorm.weight", h)
        for which in ("q", "k", "v", "o"):
            if "quantized_attention" in spec.extras:
                values = torch.randint(256, (h, h), generator=generator, dtype=torch.int32)
                scales = (torch.rand(h, 1, generator=generator) * 0.01).to(spec.dtype)
                parts = ct_tensors(Projection(values=values, scales=scales, bits=8), spec)
                out |= {f"{name}.self_attn.{which}_proj.{part}": tensor for part, tensor in parts.items()}
            elif "attention" in spec.extras:
                dense(f"{name}.self_attn.{which}_proj.weight", h, h)
        if layer not in (*spec.moe_layers, *mtp):
            mlp(block)
            continue
        if "router" in spec.extras:
            dense(f"{block}.gate.weight", spec.num_experts, h)
            dense(f"{block}.gate.e_score_correction_bias", spec.num_experts, dtype=torch.float32)
        if "shared_experts" in spec.extras:
            mlp(f"{block}.shared_experts")
        if layer in mtp:
            for number in range(spec.num_experts):
                for spelling, shape in zip(NAMINGS[spec.naming][1], ((i, h), (i, h), (h, i)), strict=True):
                    dense(f"{spec.module(layer)}.{number}.{spelling}.weight", *shape)
    return out
