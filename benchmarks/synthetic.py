"""A source checkpoint in Qwen3-30B-A3B's shapes (compressed-tensors INT4, groups of 128), with random words.

Written as the public tools write it: shards of whole layers, in each the wide dtypes first and names in
order, and an index. A layer takes 0.32 GB; one layer's values stand in all of them, so making it is quick.
"""

import json
import math
from collections.abc import Iterator
from pathlib import Path

import torch

HIDDEN, INTERMEDIATE, EXPERTS, GROUP, VOCABULARY = 2048, 768, 128, 128, 151936
LAYERS_PER_SHARD = 4
DTYPES = {torch.int32: "I32", torch.int64: "I64", torch.bfloat16: "BF16"}

CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": HIDDEN,
    "moe_intermediate_size": INTERMEDIATE,
    "num_experts": EXPERTS,
    "num_experts_per_tok": 8,
    "quantization_config": {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {
            "group_0": {
                "targets": ["re:.*mlp.experts.*"],
                "weights": {
                    "num_bits": 4,
                    "type": "int",
                    "symmetric": True,
                    "strategy": "group",
                    "group_size": GROUP,
                },
            }
        },
        "ignore": ["lm_head"],
    },
}


def write_checkpoint(path: Path, num_layers: int) -> None:
    """Shards, index and config of `num_layers` layers below a new directory."""
    path.mkdir(parents=True)
    values = _layer_values()
    weight_map: dict[str, str] = {}
    starts = range(0, num_layers, LAYERS_PER_SHARD)
    for number, start in enumerate(starts):
        file = f"model-{number + 1:05d}-of-{len(starts):05d}.safetensors"
        tensors = {
            f"model.layers.{layer}.{name}": tensor
            for layer in range(start, min(start + LAYERS_PER_SHARD, num_layers))
            for name, tensor in values.items()
        }
        if number == 0:
            tensors["model.embed_tokens.weight"] = _bytes_of(torch.bfloat16, VOCABULARY, HIDDEN)
        _write_shard(path / file, tensors)
        weight_map |= dict.fromkeys(tensors, file)
    index = {"metadata": {}, "weight_map": dict(sorted(weight_map.items()))}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    (path / "config.json").write_text(json.dumps(CONFIG | {"num_hidden_layers": num_layers}))


def _layer_values() -> dict[str, torch.Tensor]:
    """The tensors of a layer by their names below it."""
    values = {
        "mlp.gate.weight": _bytes_of(torch.bfloat16, EXPERTS, HIDDEN),
        "self_attn.q_proj.weight": _bytes_of(torch.bfloat16, 4096, HIDDEN),
        "self_attn.k_proj.weight": _bytes_of(torch.bfloat16, 512, HIDDEN),
        "self_attn.v_proj.weight": _bytes_of(torch.bfloat16, 512, HIDDEN),
        "self_attn.o_proj.weight": _bytes_of(torch.bfloat16, HIDDEN, 4096),
        "input_layernorm.weight": _bytes_of(torch.bfloat16, HIDDEN),
        "post_attention_layernorm.weight": _bytes_of(torch.bfloat16, HIDDEN),
    }
    for expert in range(EXPERTS):
        for projection, n, k in (
            ("gate_proj", INTERMEDIATE, HIDDEN),
            ("up_proj", INTERMEDIATE, HIDDEN),
            ("down_proj", HIDDEN, INTERMEDIATE),
        ):
            name = f"mlp.experts.{expert}.{projection}"
            values[f"{name}.weight_packed"] = _bytes_of(torch.int32, n, k // 8)
            values[f"{name}.weight_scale"] = torch.rand(n, k // GROUP).add_(0.5).bfloat16()
            values[f"{name}.weight_shape"] = torch.tensor([n, k])
    return values


def _bytes_of(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Random bits."""
    return (
        torch.randint(-(2**31), 2**31, (math.prod(shape) * dtype.itemsize // 4,), dtype=torch.int32)
        .view(dtype)
        .view(shape)
    )


def _in_file_order(tensors: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Wide dtypes first, then by name, as safetensors' own writer has it."""
    return iter(sorted(tensors.items(), key=lambda item: (-item[1].dtype.itemsize, item[0])))


def _write_shard(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """One safetensors file, without holding its bytes a second time."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, tensor in _in_file_order(tensors):
        entry = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape)}
        header[name] = entry | {"data_offsets": [offset, offset + tensor.nbytes]}
        offset += tensor.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, tensor in _in_file_order(tensors):
            file.write(tensor.view(torch.uint8).numpy() if tensor.numel() else b"")
