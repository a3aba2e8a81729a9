"""config.json of a made-up checkpoint."""

from __future__ import annotations

from typing import Any

from checkpoint_spec import NAMINGS, CheckpointSpec

MODEL_TYPES = {"qwen": "qwen3_moe", "mixtral": "mixtral", "feed_forward": "llama4_text", "lfm2": "lfm2_moe"}


def model_config(spec: CheckpointSpec) -> dict[str, Any]:
    """The whole config.json; with `text_config` everything about the language model lies one level deeper."""
    model: dict[str, Any] = {
        "model_type": MODEL_TYPES[spec.naming],
        "dtype": str(spec.dtype).removeprefix("torch."),
        "hidden_act": "silu",
        "hidden_size": spec.hidden_size,
        "num_hidden_layers": spec.num_layers,
        "num_experts_per_tok": spec.top_k,
        "vocab_size": 64,
    }
    if spec.naming == "mixtral":
        model |= {"num_local_experts": spec.num_experts, "intermediate_size": spec.intermediate_size}
    else:
        model |= {"num_experts": spec.num_experts, "moe_intermediate_size": spec.intermediate_size}
    model["quantization_config"] = quantization_config(spec)
    if spec.text_config:
        return {"architectures": ["ForConditionalGeneration"], "model_type": "outer", "text_config": model}
    return {"architectures": ["ForCausalLM"], **model}


def quantization_config(spec: CheckpointSpec) -> dict[str, Any]:
    if spec.storage in ("gptq", "gptq_v2"):
        return {
            "quant_method": "gptq",
            "bits": spec.bits,
            "group_size": -1 if spec.group_size is None else spec.group_size,
            "sym": spec.symmetric,
            "desc_act": spec.has_g_idx,
            "checkpoint_format": spec.storage,
            "lm_head": False,
            "dynamic": {r"-:.*\.gate$": {}, r"-:.*self_attn.*": {}, r"-:.*shared_experts.*": {}},
        }
    if spec.storage == "awq":
        block = NAMINGS[spec.naming][0].rsplit(".", 1)[0]
        return {
            "quant_method": "awq",
            "bits": 4,
            "group_size": -1 if spec.group_size is None else spec.group_size,
            "version": "gemm",
            "zero_point": True,
            "modules_to_not_convert": [f"{block}.gate", "self_attn", "shared_experts", "lm_head"],
        }
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": _config_groups(spec),
        "ignore": _ignore(spec),
        "global_compression_ratio": None,
        "kv_cache_scheme": None,
        "sparsity_config": {},
        "transform_config": {},
        "version": "0.19.0",
    }


def _config_groups(spec: CheckpointSpec) -> dict[str, Any]:
    """Groups in module order: attention, where it is quantized, comes before the experts."""
    gate, up, down = NAMINGS[spec.naming][1]
    groups = []
    if "quantized_attention" in spec.extras:
        groups.append(_group(["re:.*self_attn.*"], spec, (8, None), symmetric=True, actorder=None))
    shared: dict[str, Any] = {"symmetric": spec.symmetric, "actorder": spec.actorder}
    if spec.down != spec.gate_up:
        gate_up = f"re:.*experts.*({gate}|{up}|gate_up_proj)$"
        groups.append(_group([gate_up], spec, spec.gate_up, **shared))
        groups.append(_group([f"re:.*experts.*{down}$"], spec, spec.down, **shared))
    else:
        targets = ["re:.*experts.*"] if "quantized_attention" in spec.extras else ["Linear"]
        groups.append(_group(targets, spec, spec.gate_up, **shared))
    return {f"group_{number}": group for number, group in enumerate(groups)}


def _group(
    targets: list[str],
    spec: CheckpointSpec,
    form: tuple[int, int | None],
    *,
    symmetric: bool,
    actorder: str | bool | None,
) -> dict[str, Any]:
    bits, group_size = form
    return {
        "format": "pack-quantized",
        "targets": targets,
        "input_activations": None,
        "output_activations": None,
        "weights": {
            "type": "int",
            "num_bits": bits,
            "strategy": "channel" if group_size is None else "group",
            "group_size": group_size,
            "symmetric": symmetric,
            "actorder": actorder,
            "dynamic": False,
            "block_structure": None,
            "observer": "minmax",
            "observer_kwargs": {},
            "scale_dtype": None,
            "zp_dtype": None if symmetric else "torch.int8",
        },
    }


def _ignore(spec: CheckpointSpec) -> list[str]:
    """Plain names, as a save leaves them. MTP layers are not listed, as in the field."""
    ignored = ["lm_head"]
    for layer in range(spec.num_layers):
        block = spec.module(layer).rsplit(".", 1)[0]
        if "quantized_attention" not in spec.extras:
            ignored += [f"{spec.prefix}.{layer}.self_attn.{which}_proj" for which in "qkvo"]
        projections = ("gate_proj", "up_proj", "down_proj")
        if layer not in spec.moe_layers:
            ignored += [f"{block}.{which}" for which in projections]
            continue
        ignored.append(f"{block}.gate")
        if "shared_experts" in spec.extras:
            ignored += [f"{block}.shared_experts.{which}" for which in projections]
    return ignored
