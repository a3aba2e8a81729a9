"""Logits and greedy tokens of `load_model` against transformers with exactly dequantized weights."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from exact_model import dense_tensors, exact_model
from folders import checkpoint_folders, golden
from hf_checkpoints import FAMILIES, Weights, fuse_experts, weights_of, write_model
from marlin_moe import repack_checkpoint
from marlin_moe.integrations.transformers import load_model

TOLERANCE = 1e-4
PROMPTS = torch.tensor([[3, 99, 17, 201, 5, 64, 64, 130, 8], [250, 1, 77, 30, 30, 211, 9, 45, 163]])


def assert_same(model: Any, reference: Any) -> None:
    """Logits within the tolerance, and the same greedy tokens."""
    found, expected = model(PROMPTS).logits, reference(PROMPTS).logits
    error = float((found - expected).norm() / expected.norm())
    assert error < TOLERANCE, error
    assert expected.std() > 0.1, "logits that hardly differ show nothing"
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    torch.testing.assert_close(model.generate(PROMPTS, **options), reference.generate(PROMPTS, **options))


@pytest.mark.parametrize("folder", checkpoint_folders(), ids=lambda path: path.name)
def test_checkpoints_of_the_public_tools(folder: Path) -> None:
    assert_same(load_model(folder, dtype=torch.float32), exact_model(folder))


@pytest.mark.parametrize("family", FAMILIES)
def test_families_of_models(family: str, tmp_path: Path) -> None:
    """Packed and unpacked: shared experts, scaling and normalization of routers are the model's own."""
    source = write_model(tmp_path / "source", family)
    reference = exact_model(source)
    assert_same(load_model(source, dtype=torch.float32), reference)
    repack_checkpoint(source, tmp_path / "packed")
    assert_same(load_model(tmp_path / "packed", dtype=torch.float32), reference)


def mixed(name: str) -> Weights | None:
    """Layer 0 INT4 with INT8 for down, layer 1 INT8 with zero points: one scheme for all would be wrong."""
    if ".layers.1." in name:
        return weights_of(name, Weights(bits=8, group_size=64, symmetric=False))
    return weights_of(name, Weights(bits=8 if "down_proj" in name else 4))


def first_plain(name: str) -> Weights | None:
    """The experts of layer 0 stay as they are."""
    return None if ".layers.0.mlp.experts." in name else weights_of(name, Weights())


def asymmetric_attention(name: str) -> Weights | None:
    return Weights(symmetric=False) if weights_of(name, Weights()) else None


@pytest.mark.parametrize("recipe", [mixed, first_plain, asymmetric_attention])
def test_what_transformers_itself_cannot_load(recipe: Any, tmp_path: Path) -> None:
    source = write_model(tmp_path / "source", "qwen3_moe", recipe=recipe)
    assert_same(load_model(source, dtype=torch.float32), exact_model(source))


def test_experts_in_3d_tensors(tmp_path: Path) -> None:
    source = write_model(tmp_path / "source", "qwen3_5_moe_text")
    dense = dense_tensors(source)
    fuse_experts(source)
    assert_same(load_model(source, dtype=torch.float32), exact_model(source, tensors=dense))


def test_float8_attention_beside_int4_experts(tmp_path: Path) -> None:
    """A format that Marlin does not run is dequantized by compressed-tensors."""
    import json

    source = write_model(
        tmp_path / "source",
        "glm4_moe",
        recipe=lambda name: Weights() if ".experts." in name and name.endswith("weight") else None,
    )
    tensors = load_file(source / "model.safetensors")
    dense = dense_tensors(source)
    attention = [name for name in tensors if ".self_attn." in name and name.endswith("_proj.weight")]
    for name in attention:
        weight = tensors[name].float()
        scale = (weight.abs().amax(1, keepdim=True) / 448).bfloat16()
        tensors[name] = (weight / scale).to(torch.float8_e4m3fn)
        tensors[f"{name}_scale"] = scale
        dense[name] = tensors[name].float() * scale.float()
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"]["config_groups"]["group_1"] = {
        "targets": ["re:.*self_attn.*"],
        "format": "float-quantized",
        "weights": {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True},
    }
    (source / "config.json").write_text(json.dumps(config))
    assert_same(load_model(source, dtype=torch.float32), exact_model(source, tensors=dense))


def test_a_model_in_bfloat16_and_its_generation_config(tmp_path: Path) -> None:
    """The config's dtype is the default; weights are rounded once, routers' corrections stay float32."""
    source = shutil.copytree(golden("qwen3moe-w4a16-asym-g128"), tmp_path / "source")
    (source / "generation_config.json").write_text('{"max_new_tokens": 3, "eos_token_id": 7}')
    model, reference = load_model(source), exact_model(source)
    assert model.dtype == torch.bfloat16
    assert model.generation_config.eos_token_id == 7
    assert model.generate(PROMPTS, do_sample=False, pad_token_id=0).shape[1] <= PROMPTS.shape[1] + 3
    exact = reference.model.layers[0].self_attn.q_proj.weight
    torch.testing.assert_close(
        model.model.layers[0].self_attn.q_proj.weight, exact.bfloat16(), rtol=0, atol=0
    )
    found, expected = model(PROMPTS).logits.float(), reference(PROMPTS).logits
    assert float((found - expected).norm() / expected.norm()) < 0.05
    assert not any(parameter.requires_grad for parameter in model.parameters())
