"""Experts are found by structure, whatever the model calls them; unknown projections are an error."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoints import CheckpointSpec, Source, make_source, write_checkpoint, write_source
from compare_layer import as_expected
from marlin_moe import load_layers
from marlin_moe.repack.errors import ExpertsError
from mutations import edit_config

SPEC = CheckpointSpec(num_experts=2, hidden_size=64, intermediate_size=64, extras=("router",))
PROJ = ("gate_proj", "up_proj", "down_proj")
W132 = ("w1", "w3", "w2")
# model -> experts module of a layer, and how it spells gate, up and down
NAMES = {
    "Qwen3-MoE": ("model.layers.3.mlp.experts", PROJ),
    "Qwen3-Next, text_config": ("model.language_model.layers.3.mlp.experts", PROJ),
    "Kimi-K2.5": ("language_model.model.layers.3.mlp.experts", PROJ),
    "DeepSeek-V3's own": ("layers.3.ffn.experts", W132),
    "GLM-4.5": ("model.layers.3.mlp.experts", PROJ),
    "Ernie 4.5": ("model.layers.3.mlp.experts", PROJ),
    "Bailing": ("model.layers.3.mlp.experts", PROJ),
    "dots1": ("model.layers.3.mlp.experts", PROJ),
    "Llama-4": ("language_model.model.layers.3.feed_forward.experts", PROJ),
    "granite": ("model.layers.3.block_sparse_moe.experts", PROJ),
    "Mixtral": ("model.layers.3.block_sparse_moe.experts", W132),
    "MiniMax": ("model.layers.3.block_sparse_moe.experts", W132),
    "Kimi-Linear": ("model.layers.3.block_sparse_moe.experts", W132),
    "LFM2": ("model.layers.3.feed_forward.experts", W132),
    "Jamba": ("model.layers.3.feed_forward.experts", PROJ),
    "DBRX": ("transformer.blocks.3.ffn.experts.mlp", ("w1", "v1", "w2")),
    "Grok-1": ("model.layers.3.moe_block.experts", ("linear", "linear_v", "linear_1")),
    "a model of tomorrow": ("decoder.stack.3.mixture.members", PROJ),
}


def respelt(module: str, triple: tuple[str, str, str], **changes: object) -> tuple[Source, str]:
    """A checkpoint with its experts under another name; and the name that they had."""
    source = make_source(replace(SPEC, **changes))  # type: ignore[arg-type]
    (old,) = source.layers
    tensors = {}
    for name, tensor in source.tensors.items():
        if name.startswith(f"{old}."):
            expert, projection, field = name.removeprefix(f"{old}.").split(".")
            name = f"{module}.{expert}.{triple[PROJ.index(projection)]}.{field}"
        tensors[name] = tensor
    return replace(source, tensors=tensors), old


@pytest.mark.parametrize("storage", ["compressed-tensors", "gptq"])
@pytest.mark.parametrize("model", NAMES)
def test_models_of_the_field(tmp_path: Path, model: str, storage: str) -> None:
    module, triple = NAMES[model]
    source, old = respelt(module, triple, storage=storage)
    write_source(tmp_path, source)
    layers = load_layers(tmp_path)
    assert list(layers) == [module]
    as_expected(layers[module], source.layers[old])


def test_gpt_oss_experts_as_linears_with_a_bias(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path, SPEC, bias=True)
    edit_config(tmp_path, lambda config: config.update(model_type="gpt_oss"))
    ((module, layer),) = load_layers(tmp_path).items()
    as_expected(layer, source.layers[module])


def test_gpt_oss_fused_experts_are_interleaved_and_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, SPEC, storage="fused")
    edit_config(tmp_path, lambda config: config.update(model_type="gpt_oss"))
    with pytest.raises(ExpertsError, match=r"mlp\.experts\.gate_up_proj_packed.*gpt_oss"):
        load_layers(tmp_path)


@pytest.mark.parametrize(
    ("triple", "seen"),
    [
        (("fc1", "fc3", "fc2"), "fc1, fc2, fc3"),
        (("gate", "up", "down"), "down, gate, up"),
        (("gate_proj", "up", "down_proj"), "down_proj, gate_proj, up"),
    ],
)
def test_an_unknown_triple_lists_what_was_seen(
    tmp_path: Path, triple: tuple[str, str, str], seen: str
) -> None:
    source, _ = respelt("model.layers.3.mlp.experts", triple)
    write_source(tmp_path, source)
    with pytest.raises(ExpertsError, match=rf"layers\.3\.mlp\.experts: expected .* got {seen}\.") as found:
        load_layers(tmp_path)
    assert "gate_proj/up_proj/down_proj; w1/w3/w2; w1/v1/w2; linear/linear_v/linear_1" in str(found.value)


def test_experts_without_a_gate_are_refused_by_name(tmp_path: Path) -> None:
    source, _ = respelt("backbone.layers.3.mixer.experts", PROJ)
    kept = {name: tensor for name, tensor in source.tensors.items() if ".gate_proj." not in name}
    write_source(tmp_path, replace(source, tensors=kept))
    with pytest.raises(
        ExpertsError, match=r"backbone\.layers\.3\.mixer\.experts: .* got down_proj, up_proj\."
    ):
        load_layers(tmp_path)


def test_3d_experts_below_another_name_are_not_ignored(tmp_path: Path) -> None:
    """granite's own layout: input_linear [E, 2I, H] and output_linear beside the router."""
    write_checkpoint(tmp_path, SPEC, storage="fused-nested", num_layers=2)
    tensors = load_file(tmp_path / "model.safetensors")
    old, new = "model.layers.1.mlp.experts", "model.layers.1.block_sparse_moe"
    renamed = {
        name.replace(old, new).replace("gate_up_proj", "input_linear").replace("down_proj", "output_linear")
        if name.startswith(old)
        else name: tensor
        for name, tensor in tensors.items()
    }
    save_file(renamed, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ExpertsError, match=rf"{new}: expected experts .* got input_linear, output_linear\."):
        load_layers(tmp_path)


def test_only_the_scales_of_fused_experts(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, SPEC, storage="fused", num_layers=2)
    tensors = load_file(tmp_path / "model.safetensors")
    kept = {
        k: t for k, t in tensors.items() if not k.startswith("model.layers.1") or not k.endswith("_packed")
    }
    save_file(kept, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        ExpertsError, match=r"layers\.1\.mlp\.experts: expected packed words .*gate_up_proj_scale"
    ):
        load_layers(tmp_path)


def test_only_the_scales_of_numbered_experts(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, SPEC, num_layers=2)
    tensors = load_file(tmp_path / "model.safetensors")
    kept = {
        k: t for k, t in tensors.items() if not k.startswith("model.layers.1") or not k.endswith("_packed")
    }
    save_file(kept, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ExpertsError, match=r"layers\.1\.mlp\.experts\.0\.up_proj\.weight_packed: .* nothing"):
        load_layers(tmp_path)


def test_fused_errors_name_the_tensors_that_are_stored(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, SPEC, storage="fused")
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.mlp.experts.gate_up_proj_scale"
    tensors[name][1, 70:] = torch.nan
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ExpertsError, match=rf"{name} \(expert 1, up_proj\): expected finite"):
        load_layers(tmp_path)
    tensors[name] = tensors[name][..., :1].contiguous()
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ExpertsError, match=rf"{name} \(expert 0, gate_proj\): expected \(64, 2\)"):
        load_layers(tmp_path)
