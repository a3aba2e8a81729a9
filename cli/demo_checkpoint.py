"""The demo's checkpoint: random experts, quantized and read back by compressed-tensors' own code."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch

NUM_EXPERTS, HIDDEN_SIZE, INTERMEDIATE_SIZE, TOP_K = 8, 256, 128, 2
SEED = 20
Experts: TypeAlias = list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
"""gate, up [I, H] and down [H, I] of every expert, float64."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoLayer:
    """How the experts of one layer are quantized."""

    module: str
    bits: int
    group_size: int
    symmetric: bool

    def __str__(self) -> str:
        kind = "symmetric" if self.symmetric else "with zero points"
        return f"int{self.bits}, groups of {self.group_size}, {kind}"


LAYERS = (
    DemoLayer(module="model.layers.0.mlp.experts", bits=4, group_size=32, symmetric=True),
    DemoLayer(module="model.layers.1.mlp.experts", bits=4, group_size=64, symmetric=False),
)


def write_demo_checkpoint(path: Path) -> int:
    """Write a checkpoint of two MoE layers in two shards below `path`; the bytes of its tensors."""
    from safetensors.torch import save_file

    path.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(SEED)
    shards = [_layer_tensors(number, layer, generator) for number, layer in enumerate(LAYERS)]
    weight_map = {}
    for number, tensors in enumerate(shards, start=1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(tensors, path / name, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(tensors, name))
    total = sum(tensor.nbytes for tensors in shards for tensor in tensors.values())
    _write_json(
        path / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map}
    )
    _write_json(path / "config.json", _config())
    return total


def exact_experts(path: Path, layer: DemoLayer) -> Experts:
    """(gate, up [I, H], down [H, I]) in float64 of every expert, by compressed-tensors' own decompressor.

    Its arithmetic is done in the dtype of the scales; float64 scales make (q - zero point) * scale exact.
    """
    compressor, scheme = _compressor(), _scheme(layer)
    tensors = _read_tensors(path)
    experts = []
    for expert in range(NUM_EXPERTS):
        weights = []
        for projection in ("gate_proj", "up_proj", "down_proj"):
            prefix = f"{layer.module}.{expert}.{projection}."
            own = {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
            own["weight_scale"] = own["weight_scale"].to(torch.float64)
            weights.append(compressor.decompress(own, scheme)["weight"])
        gate, up, down = weights
        experts.append((gate, up, down))
    return experts


def _layer_tensors(number: int, layer: DemoLayer, generator: torch.Generator) -> dict[str, torch.Tensor]:
    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) / math.sqrt(shape[-1])

    block = f"model.layers.{number}"
    plain = {
        f"{block}.input_layernorm.weight": torch.ones(HIDDEN_SIZE),
        f"{block}.self_attn.q_proj.weight": random(HIDDEN_SIZE, HIDDEN_SIZE),
        f"{block}.mlp.gate.weight": random(NUM_EXPERTS, HIDDEN_SIZE),
    }
    tensors = {name: tensor.to(torch.bfloat16) for name, tensor in plain.items()}
    for expert in range(NUM_EXPERTS):
        for projection, n, k in (
            ("gate_proj", INTERMEDIATE_SIZE, HIDDEN_SIZE),
            ("up_proj", INTERMEDIATE_SIZE, HIDDEN_SIZE),
            ("down_proj", HIDDEN_SIZE, INTERMEDIATE_SIZE),
        ):
            for field, tensor in _compress(random(n, k), layer).items():
                tensors[f"{layer.module}.{expert}.{projection}.{field}"] = tensor.contiguous()
    return tensors


def _compress(weight: torch.Tensor, layer: DemoLayer) -> Mapping[str, torch.Tensor]:
    """compressed-tensors' scales, zero points and packed words of weight [N, K]."""
    from compressed_tensors.quantization.utils import calculate_qparams

    scheme = _scheme(layer)
    groups = weight.view(len(weight), -1, layer.group_size)  # [N, G, group_size]
    scale, zero_point = calculate_qparams(groups.amin(2), groups.amax(2), scheme.weights)
    state = {"weight": weight, "weight_scale": scale.to(torch.bfloat16), "weight_zero_point": zero_point}
    compressed: Mapping[str, torch.Tensor] = _compressor().compress(state, scheme)
    return compressed


def _compressor() -> Any:
    from compressed_tensors.compressors import BaseCompressor

    return BaseCompressor.get_value_from_registry("pack-quantized")


def _scheme(layer: DemoLayer) -> Any:
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    weights = QuantizationArgs(
        num_bits=layer.bits, symmetric=layer.symmetric, strategy="group", group_size=layer.group_size
    )
    pattern = layer.module.replace(".", r"\.")
    return QuantizationScheme(targets=[rf"re:{pattern}\.\d+\..*"], weights=weights, format="pack-quantized")


def _config() -> dict[str, Any]:
    from compressed_tensors.quantization import QuantizationConfig

    quantization = QuantizationConfig(
        config_groups={f"group_{number}": _scheme(layer) for number, layer in enumerate(LAYERS)},
        format="pack-quantized",
        quantization_status="compressed",
        ignore=["lm_head"],
    )
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "dtype": "bfloat16",
        "hidden_act": "silu",
        "hidden_size": HIDDEN_SIZE,
        "moe_intermediate_size": INTERMEDIATE_SIZE,
        "num_experts": NUM_EXPERTS,
        "num_experts_per_tok": TOP_K,
        "num_hidden_layers": len(LAYERS),
        "quantization_config": quantization.model_dump(mode="json"),
    }


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


def _read_tensors(path: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return {name: t for file in sorted(path.glob("*.safetensors")) for name, t in load_file(file).items()}
