"""A source checkpoint of a Qwen3-MoE model with random weights (compressed-tensors INT4, groups of 128).

Written as the public tools write it: shards of whole layers, in each the wide dtypes first and names in
order, and an index. Values are such that the model runs: weights near 0, norms 1. One layer's values stand
in all of them, so making it is quick; in Qwen3-30B-A3B's shapes a layer takes 0.35 GB.
"""

import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..kernels.errors import MarlinMoEError
from ..repack.tensor_file import tensor_bytes

GROUP = 128
BITS = 4
LAYERS_PER_SHARD = 4
WEIGHT_STD = 0.02
STEP = WEIGHT_STD / 4.6  # 4.6 is the deviation of -8 ... 7
DTYPES = {torch.int32: "I32", torch.int64: "I64", torch.bfloat16: "BF16"}


class RandomCheckpointError(MarlinMoEError, OSError):
    """There is no room for a checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The sizes of a Qwen3-MoE model.

    `packed_attention` quantizes attention like the experts, as the tools' default recipe does.
    """

    name: str
    hidden_size: int
    intermediate_size: int
    num_experts: int
    top_k: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    layers: int
    packed_attention: bool = True

    def as_config(self, layers: int) -> dict[str, Any]:
        """`config.json` of a model with `layers` layers."""
        return {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "dtype": "bfloat16",
            "hidden_size": self.hidden_size,
            "intermediate_size": 3 * self.hidden_size,
            "moe_intermediate_size": self.intermediate_size,
            "num_experts": self.num_experts,
            "num_experts_per_tok": self.top_k,
            "norm_topk_prob": True,
            "num_hidden_layers": layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocabulary,
            "max_position_embeddings": 40960,
            "rope_theta": 1000000.0,
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": False,
            "quantization_config": {
                "quant_method": "compressed-tensors",
                "format": "pack-quantized",
                "quantization_status": "compressed",
                "config_groups": {
                    "group_0": {
                        "targets": ["Linear"] if self.packed_attention else ["re:.*mlp.experts.*"],
                        "weights": {
                            "num_bits": BITS,
                            "type": "int",
                            "symmetric": True,
                            "strategy": "group",
                            "group_size": GROUP,
                        },
                    }
                },
                "ignore": ["lm_head", "re:.*mlp.gate$"],
            },
        }

    def linears(self) -> Iterator[tuple[str, int, int]]:
        """(name below a layer, N, K) of attention, then of every expert."""
        hidden, inner = self.hidden_size, self.heads * self.head_dim
        yield "self_attn.q_proj", inner, hidden
        for name in ("k_proj", "v_proj"):
            yield f"self_attn.{name}", self.kv_heads * self.head_dim, hidden
        yield "self_attn.o_proj", hidden, inner
        for expert in range(self.num_experts):
            for name in ("gate_proj", "up_proj"):
                yield f"mlp.experts.{expert}.{name}", self.intermediate_size, hidden
            yield f"mlp.experts.{expert}.down_proj", hidden, self.intermediate_size


SHAPES = {
    shape.name: shape
    for shape in (
        ModelShape(
            name="qwen3-30b-a3b",
            hidden_size=2048,
            intermediate_size=768,
            num_experts=128,
            top_k=8,
            heads=32,
            kv_heads=4,
            head_dim=128,
            vocabulary=151936,
            layers=48,
        ),
        ModelShape(
            name="small",
            hidden_size=256,
            intermediate_size=128,
            num_experts=8,
            top_k=2,
            heads=4,
            kv_heads=2,
            head_dim=64,
            vocabulary=512,
            layers=2,
        ),
    )
}


def write_checkpoint(path: Path, shape: ModelShape, layers: int | None = None) -> int:
    """Shards, index and config below a new directory: the bytes of all tensors.

    Raises:
        RandomCheckpointError: the disk has no room for them.
    """
    count = shape.layers if layers is None else layers
    values, ends = _layer_values(shape), _model_values(shape)
    total = sum(t.nbytes for t in values.values()) * count + sum(t.nbytes for t in ends.values())
    _require_room(path, total)
    path.mkdir(parents=True)
    weight_map: dict[str, str] = {}
    starts = range(0, count, LAYERS_PER_SHARD)
    for number, start in enumerate(starts):
        file = f"model-{number + 1:05d}-of-{len(starts):05d}.safetensors"
        tensors = {
            f"model.layers.{layer}.{name}": tensor
            for layer in range(start, min(start + LAYERS_PER_SHARD, count))
            for name, tensor in values.items()
        }
        if number == 0:
            tensors |= ends
        _write_shard(path / file, tensors)
        weight_map |= dict.fromkeys(tensors, file)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    (path / "config.json").write_text(json.dumps(shape.as_config(count)))
    return total


def _require_room(path: Path, nbytes: int) -> None:
    """Raise where the disk of a path that is not there yet has no room."""
    place = next(parent for parent in path.absolute().parents if parent.is_dir())
    free = shutil.disk_usage(place).free
    if free < nbytes:
        raise RandomCheckpointError(
            f"{path}: expected room for a checkpoint of {nbytes / 1e9:.1f} GB, got {free / 1e9:.1f} GB free. "
            "Name another folder, or write fewer layers."
        )


def _layer_values(shape: ModelShape) -> dict[str, torch.Tensor]:
    """The tensors of a layer by their names below it."""
    generator = torch.Generator().manual_seed(0)
    hidden = shape.hidden_size
    values = {
        "mlp.gate.weight": _normal(generator, shape.num_experts, hidden),
        "input_layernorm.weight": torch.ones(hidden, dtype=torch.bfloat16),
        "post_attention_layernorm.weight": torch.ones(hidden, dtype=torch.bfloat16),
        "self_attn.q_norm.weight": torch.ones(shape.head_dim, dtype=torch.bfloat16),
        "self_attn.k_norm.weight": torch.ones(shape.head_dim, dtype=torch.bfloat16),
    }
    for name, n, k in shape.linears():
        if name.startswith("self_attn.") and not shape.packed_attention:
            values[f"{name}.weight"] = _normal(generator, n, k)
            continue
        words, groups = (n, k * BITS // 32), -(-k // GROUP)
        values[f"{name}.weight_packed"] = torch.randint(
            -(2**31), 2**31, words, dtype=torch.int32, generator=generator
        )
        scales = torch.rand(n, groups, generator=generator).add_(0.5).mul_(STEP)
        values[f"{name}.weight_scale"] = scales.bfloat16()
        values[f"{name}.weight_shape"] = torch.tensor([n, k])
    return values


def _model_values(shape: ModelShape) -> dict[str, torch.Tensor]:
    """The tensors that are no layer's."""
    generator = torch.Generator().manual_seed(1)
    return {
        "model.embed_tokens.weight": _normal(generator, shape.vocabulary, shape.hidden_size),
        "model.norm.weight": torch.ones(shape.hidden_size, dtype=torch.bfloat16),
        "lm_head.weight": _normal(generator, shape.vocabulary, shape.hidden_size),
    }


def _normal(generator: torch.Generator, *shape: int) -> torch.Tensor:
    weight = torch.empty(shape, dtype=torch.bfloat16)
    return weight.normal_(std=WEIGHT_STD, generator=generator)


def _in_file_order(tensors: Mapping[str, torch.Tensor]) -> list[tuple[str, torch.Tensor]]:
    """Wide dtypes first, then by name, as safetensors' own writer has it."""
    return sorted(tensors.items(), key=lambda item: (-item[1].dtype.itemsize, item[0]))


def _write_shard(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
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
            file.write(tensor_bytes(tensor))
