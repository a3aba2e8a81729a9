"""Small checkpoints of transformers' own models, quantized by compressed-tensors' own compressor.

transformers saves a model under its published names; every linear that a `Recipe` names is then replaced by
what `PackedQuantizationCompressor` makes of it. Nothing of marlin-moe takes part.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

VOCABULARY = 256
COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "num_experts_per_tok": 2,
    "initializer_range": 0.15,  # at the default routers choose between equals, and logits hardly differ
    "bos_token_id": 0,
    "eos_token_id": None,
    "pad_token_id": None,
}
SHARED = {"n_routed_experts": 8, "n_shared_experts": 1, "first_k_dense_replace": 1, "intermediate_size": 128}
FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": COMMON | {"intermediate_size": 96, "num_local_experts": 4},
    "qwen3_moe": COMMON | {"intermediate_size": 128, "moe_intermediate_size": 64, "num_experts": 8},
    "qwen3_5_moe_text": COMMON
    | {
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 64,
        "num_experts": 8,
        "layer_types": ["linear_attention", "full_attention"],
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
    },
    "deepseek_v3": COMMON
    | SHARED
    | {
        "num_key_value_heads": 4,
        "moe_intermediate_size": 64,
        "n_group": 4,
        "topk_group": 2,
        "kv_lora_rank": 32,
        "q_lora_rank": 64,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 32,
        "v_head_dim": 32,
        "routed_scaling_factor": 2.5,
    },
    "glm4_moe": COMMON
    | SHARED
    | {"moe_intermediate_size": 64, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.5},
}
"""model_type -> arguments of its config."""
FAMILIES["qwen3_5_moe"] = {  # as published: a vision tower beside the language model
    "text_config": FAMILIES["qwen3_5_moe_text"],
    "vision_config": {
        "depth": 1,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 2,
        "out_hidden_size": 128,
        "num_position_embeddings": 16,
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """How compressed-tensors quantizes a linear."""

    bits: int = 4
    group_size: int | None = 32
    symmetric: bool = True

    def as_config(self) -> dict[str, Any]:
        return {
            "num_bits": self.bits,
            "type": "int",
            "symmetric": self.symmetric,
            "strategy": "channel" if self.group_size is None else "group",
            "group_size": self.group_size,
            "dynamic": False,
        }


def weights_of(name: str, experts: Weights) -> Weights | None:
    """The plain recipe: experts as told; attention, shared experts, dense layers in INT8 without groups."""
    if ".experts." in name and name.endswith("weight"):
        return experts
    inside = (".self_attn.", ".mlp.", ".shared_expert.", ".shared_experts.")
    if any(part in name for part in inside) and name.endswith("_proj.weight"):
        return Weights(bits=8, group_size=None)
    return None


def write_model(
    folder: Path,
    family: str,
    *,
    seed: int = 0,
    recipe: Callable[[str], Weights | None] | None = None,
    dtype: torch.dtype = torch.bfloat16,
    **changes: Any,
) -> Path:
    """A checkpoint of `family` with random weights; `recipe` says of each tensor how it is quantized.

    `changes` are arguments of its config other than those in `FAMILIES`.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    torch.manual_seed(seed)
    config = AutoConfig.for_model(family, **FAMILIES[family] | changes)
    kind = AutoModelForImageTextToText if "vision_config" in FAMILIES[family] else AutoModelForCausalLM
    model = kind.from_config(config, dtype=dtype)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.uniform_(-0.1, 0.1)
    model.save_pretrained(folder)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    choose = recipe or (lambda name: weights_of(name, Weights()))
    chosen = {name: found for name in tensors if (found := choose(name)) is not None}
    groups = list(dict.fromkeys(chosen.values()))
    for name, weights in chosen.items():
        linear = name.removesuffix(".weight")
        packed = compress(tensors.pop(name), weights)
        tensors |= {f"{linear}.{field}": tensor for field, tensor in packed.items()}
    save_file(tensors, file, metadata={"format": "pt"})
    quantization = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {
            f"group_{i}": {
                "targets": [name.removesuffix(".weight") for name in chosen if chosen[name] == weights],
                "weights": weights.as_config(),
            }
            for i, weights in enumerate(groups)
        },
        "ignore": ["lm_head"],
    }
    config_file = folder / "config.json"
    config_file.write_text(
        json.dumps(json.loads(config_file.read_text()) | {"quantization_config": quantization})
    )
    return folder


def compress(weight: torch.Tensor, weights: Weights) -> dict[str, torch.Tensor]:
    """Field -> tensor of a weight [N, K], by compressed-tensors."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams

    args = QuantizationArgs.model_validate(weights.as_config())
    size = weight.shape[1] if weights.group_size is None else weights.group_size
    grouped = weight.unflatten(1, (-1, size))
    scales, zeros = calculate_qparams(grouped.amin(-1), grouped.amax(-1), args)
    fields = {"weight": weight, "weight_scale": scales, "weight_zero_point": zeros}
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    compressor = BaseCompressor.get_value_from_registry("pack-quantized")
    return {name: tensor.contiguous() for name, tensor in compressor.compress(fields, scheme).items()}


def write_tokenizer(folder: Path) -> None:
    """A tokenizer of bytes, saved as transformers saves one."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)


def fuse_experts(folder: Path) -> None:
    """Rewrite a checkpoint's numbered experts as 3-D tensors: gate_up_proj_packed [E, 2I, K*bits/32], …"""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    modules = sorted({name.partition(".experts.")[0] for name in tensors if ".experts." in name})
    for module in (f"{name}.experts" for name in modules):
        numbers = range(len({n.split(".")[-3] for n in tensors if n.startswith(f"{module}.")}))
        for field in ("packed", "scale"):
            parts = {
                projection: [tensors.pop(f"{module}.{e}.{projection}.weight_{field}") for e in numbers]
                for projection in ("gate_proj", "up_proj", "down_proj")
            }
            pairs = zip(parts["gate_proj"], parts["up_proj"], strict=True)
            tensors[f"{module}.gate_up_proj_{field}"] = torch.stack([torch.cat(pair) for pair in pairs])
            tensors[f"{module}.down_proj_{field}"] = torch.stack(parts["down_proj"])
        for name in [n for n in tensors if n.startswith(f"{module}.") and n.endswith("weight_shape")]:
            del tensors[name]
    save_file(tensors, file, metadata={"format": "pt"})
