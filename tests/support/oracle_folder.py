"""A checkpoint directory with expected values → experts as integers, and the expected values themselves."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from oracle_formats import unpack_awq, unpack_ct, unpack_ct_zero_points, unpack_gptq, unpack_gptq_zero_points
from oracle_layer import Expert, Projection

PROJECTION_NAMES = {"gate": ("gate_proj", "w1"), "up": ("up_proj", "w3"), "down": ("down_proj", "w2")}


def sha256(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()


def read_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Every tensor of the checkpoint itself: not of expected.safetensors or golden-marlin.safetensors."""
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(path.glob("model*.safetensors")):
        tensors |= load_file(file)
    return tensors


def quantization_config(path: Path) -> dict[str, Any]:
    config = json.loads((path / "config.json").read_text())
    found: dict[str, Any] = config.get("quantization_config") or config["text_config"]["quantization_config"]
    return found


def projection_from(tensors: Mapping[str, torch.Tensor], name: str, config: Mapping[str, Any]) -> Projection:
    """The projection at `name` (".…7.gate_proj") as the quantization method of `config` stores it."""
    bias = tensors.get(f"{name}.bias")
    if config["quant_method"] == "compressed-tensors":
        packed, scales = tensors[f"{name}.weight_packed"], tensors[f"{name}.weight_scale"]
        bits = packed.shape[1] * 32 // int(tensors[f"{name}.weight_shape"][1])
        zeros = tensors.get(f"{name}.weight_zero_point")
        return Projection(
            values=unpack_ct(packed, bits),
            scales=scales,
            bits=bits,
            zero_points=None if zeros is None else unpack_ct_zero_points(zeros, bits),
            g_idx=tensors.get(f"{name}.weight_g_idx"),
            bias=bias,
        )
    bits, qweight, qzeros = config["bits"], tensors[f"{name}.qweight"], tensors[f"{name}.qzeros"]
    scales = tensors[f"{name}.scales"].T.contiguous()
    if config["quant_method"] == "awq":
        values, zeros = unpack_awq(qweight, bits), unpack_awq(qzeros, bits)
        return Projection(values=values, scales=scales, bits=bits, zero_points=zeros, bias=bias)
    assert config["quant_method"] == "gptq", config["quant_method"]
    minus_one = config.get("checkpoint_format", "gptq") != "gptq_v2"
    return Projection(
        values=unpack_gptq(qweight, bits),
        scales=scales,
        bits=bits,
        zero_points=unpack_gptq_zero_points(qzeros, bits, minus_one=minus_one),
        g_idx=tensors.get(f"{name}.g_idx"),
        bias=bias,
    )


def read_experts(path: Path, module: str) -> list[Expert]:
    """The experts under `module` ("model.layers.0.mlp.experts"), in the order of their numbers."""
    tensors, config = read_tensors(path), quantization_config(path)
    below = [name.removeprefix(module + ".") for name in tensors if name.startswith(module + ".")]
    numbers = sorted({int(name.split(".")[0]) for name in below})
    assert numbers, f"no tensor below {module}"
    assert numbers == list(range(len(numbers))), (module, numbers)

    def projection(number: int, kind: str) -> Projection:
        for spelling in PROJECTION_NAMES[kind]:
            name = f"{module}.{number}.{spelling}"
            if any(other.startswith(name + ".") for other in tensors):
                return projection_from(tensors, name, config)
        raise KeyError(f"{module}.{number}: no {kind}")

    return [
        Expert(gate=projection(n, "gate"), up=projection(n, "up"), down=projection(n, "down"))
        for n in numbers
    ]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExpectedValues:
    """What expected.json, expected.safetensors and golden-marlin.safetensors of a directory say.

    `module` is the experts module of the first MoE layer; `dense_sha256` maps "module.7.gate_proj.weight" to
    the hash of its float32 bytes, `marlin_sha256` "w13_qweight" … to hashes; `marlin` holds the whole tensors
    where they are given.
    """

    module: str
    dense_sha256: dict[str, str]
    marlin_sha256: dict[str, str]
    marlin: dict[str, torch.Tensor]
    x: torch.Tensor
    topk_ids: torch.Tensor
    topk_weights: torch.Tensor
    y: torch.Tensor


def read_expected(path: Path) -> ExpectedValues:
    facts = json.loads((path / "expected.json").read_text())
    run = load_file(path / "expected.safetensors")
    marlin_file = path / "golden-marlin.safetensors"
    return ExpectedValues(
        module=facts["moe_prefix"],
        dense_sha256={name: entry["sha256"] for name, entry in facts["dequantized_float32"].items()},
        marlin_sha256={name: entry["sha256"] for name, entry in facts.get("marlin", {}).items()},
        marlin=load_file(marlin_file) if marlin_file.exists() else {},
        **{name: run[name] for name in ("x", "topk_ids", "topk_weights", "y")},
    )
