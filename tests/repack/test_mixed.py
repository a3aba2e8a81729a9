"""Models that mix formats: WNA16 experts load exactly, all else is carried untouched, or it is refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from checkpoints import CheckpointSpec, Source, make_source, write_source
from compare_layer import as_expected, equal_bytes
from marlin_moe import load_layers, repack_checkpoint, verify_checkpoint
from marlin_moe.repack.errors import ExpertsError, SchemeError

SPEC = CheckpointSpec(num_experts=2, hidden_size=64, intermediate_size=128, extras=("router", "attention"))


def joined(*parts: CheckpointSpec) -> Source:
    """A checkpoint whose layer i is that of parts[i], each under a config group of its own."""
    made = [
        make_source(replace(part, num_layers=len(parts), seed=part.seed + i)) for i, part in enumerate(parts)
    ]
    tensors: dict[str, torch.Tensor] = {}
    layers, groups = {}, {}
    for i, source in enumerate(made):
        prefix = f"model.layers.{i}."
        tensors |= {name: tensor for name, tensor in source.tensors.items() if name.startswith(prefix)}
        layers |= {module: experts for module, experts in source.layers.items() if module.startswith(prefix)}
        for name, group in source.config["quantization_config"]["config_groups"].items():
            target = group["targets"][0].replace("Linear", "re:.*experts.*")
            here = target.replace("re:.*experts", rf"re:.*layers\.{i}\..*experts")
            groups[f"{name}_of_{i}"] = group | {"targets": [here]}
    config = made[0].config
    config["quantization_config"]["config_groups"] = groups
    return Source(spec=replace(SPEC, num_layers=len(parts)), layers=layers, tensors=tensors, config=config)


def with_tensors(
    source: Source, more: Mapping[str, torch.Tensor], *, without: tuple[str, ...] = ()
) -> Source:
    kept = {
        name: tensor for name, tensor in source.tensors.items() if not any(part in name for part in without)
    }
    return replace(source, tensors=kept | dict(more))


def loads_and_repacks(path: Path, source: Source) -> None:
    """All layers are the oracle's, from the source and packed; all other tensors are carried bit for bit."""
    write_source(path / "source", source)
    repack_checkpoint(path / "source", path / "packed")
    for checkpoint in (path / "source", path / "packed"):
        layers = load_layers(checkpoint)
        assert list(layers) == list(source.layers)
        for module, experts in source.layers.items():
            as_expected(layers[module], experts)
    carried: dict[str, torch.Tensor] = {}
    for file in (path / "packed").glob("rest-*.safetensors"):
        carried |= load_file(file)
    modules = tuple(f"{module}." for module in source.layers)
    expected = {name: tensor for name, tensor in source.tensors.items() if not name.startswith(modules)}
    assert carried.keys() == expected.keys()
    for name, tensor in expected.items():
        equal_bytes(carried[name], tensor, name)
    assert verify_checkpoint(path / "packed", path / "source").ok


def test_bits_groups_and_zero_points_differ_by_layer(tmp_path: Path) -> None:
    source = joined(
        SPEC,
        replace(SPEC, bits=8, group_size=64, down_group_size=128),
        replace(SPEC, group_size=None, symmetric=False),
        replace(SPEC, group_size=64),
        replace(SPEC, bits=8),
    )
    loads_and_repacks(tmp_path, source)
    layers = load_layers(tmp_path / "packed")
    assert [layer.w13.format.bits for layer in layers.values()] == [4, 8, 4, 4, 8]
    assert [layer.w2.format.group_size for layer in layers.values()] == [32, None, None, 64, 32]


@pytest.mark.parametrize(
    "down",
    [{"down_bits": 8}, {"down_group_size": 64}, {"down_bits": 8, "down_group_size": None}, {"bits": 8}],
)
def test_gate_up_and_down_differ(tmp_path: Path, down: dict[str, Any]) -> None:
    more = {"down_bits": 4} if "bits" in down else {}
    loads_and_repacks(tmp_path, make_source(replace(SPEC, **down, **more)))


def test_int4_experts_beside_int8_attention(tmp_path: Path) -> None:
    loads_and_repacks(tmp_path, make_source(replace(SPEC, extras=("router", "quantized_attention", "norms"))))


def test_int4_experts_beside_fp8_attention(tmp_path: Path) -> None:
    source = make_source(replace(SPEC, extras=("router", "attention")))
    name = "model.layers.0.self_attn.q_proj"
    fp8 = {
        f"{name}.weight": source.tensors[f"{name}.weight"].to(torch.float8_e4m3fn),
        f"{name}.weight_scale": torch.rand(64, 1, dtype=torch.float32),
    }
    config = source.config["quantization_config"]
    weights = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False}
    acts = {"num_bits": 8, "type": "float", "strategy": "token", "symmetric": True, "dynamic": True}
    config["config_groups"] = {
        "group_0": {
            "targets": ["re:.*self_attn.*"], "weights": weights, "input_activations": acts,
            "format": "float-quantized",
        },
        "group_1": config["config_groups"]["group_0"] | {"targets": ["re:.*experts.*"]},
    }  # fmt: skip
    config["format"] = "mixed-precision"
    config["ignore"] = ["lm_head"]
    loads_and_repacks(tmp_path, with_tensors(source, fp8))


def test_int4_experts_beside_unquantized_attention(tmp_path: Path) -> None:
    loads_and_repacks(tmp_path, make_source(SPEC))


def test_shared_experts_dense_layers_and_mtp_layers_are_carried(tmp_path: Path) -> None:
    extras = ("router", "attention", "embeddings", "norms", "shared_experts", "dense_first", "mtp")
    loads_and_repacks(tmp_path, make_source(replace(SPEC, num_layers=3, extras=extras)))


def test_quantized_shared_experts_are_carried(tmp_path: Path) -> None:
    source = make_source(SPEC)
    module = "model.layers.0.mlp.experts.0."
    shared = {
        name.replace("mlp.experts.0.", "mlp.shared_expert."): tensor.clone()
        for name, tensor in source.tensors.items()
        if name.startswith(module)
    }
    loads_and_repacks(tmp_path, with_tensors(source, shared))


def test_only_some_layers_quantized(tmp_path: Path) -> None:
    source = make_source(replace(SPEC, num_layers=2))
    plain = {
        f"model.layers.1.mlp.experts.{e}.{projection}.weight": torch.randn(shape).bfloat16()
        for e in range(2)
        for projection, shape in (("gate_proj", (128, 64)), ("up_proj", (128, 64)), ("down_proj", (64, 128)))
    }
    source.config["quantization_config"]["ignore"].append(r"re:.*layers\.1\..*")
    mixed = with_tensors(source, plain, without=("layers.1.mlp.experts.",))
    loads_and_repacks(
        tmp_path, replace(mixed, layers={k: v for k, v in source.layers.items() if "layers.0" in k})
    )


def regrouped(source: Source, targets: dict[str, dict[str, Any]]) -> Source:
    """The experts' one config group as several: targets -> changed weights."""
    (group,) = source.config["quantization_config"]["config_groups"].values()
    source.config["quantization_config"]["config_groups"] = {
        f"group_{i}": group | {"targets": [target], "weights": group["weights"] | changes}
        for i, (target, changes) in enumerate(targets.items())
    }
    return source


def test_gate_unlike_up_is_refused_by_name(tmp_path: Path) -> None:
    targets = {"re:.*gate_proj$": {"num_bits": 8}, "re:.*(up|down)_proj$": {}}
    write_source(tmp_path, regrouped(make_source(SPEC), targets))
    with pytest.raises(SchemeError, match=r"layers\.0\.mlp\.experts\.0\.up_proj: expected int8.*got int4"):
        load_layers(tmp_path)


def test_experts_of_one_layer_that_differ_are_refused_by_name(tmp_path: Path) -> None:
    targets = {r"re:.*experts\.1\..*": {"group_size": 64}, r"re:.*experts\.0\..*": {}}
    write_source(tmp_path, regrouped(make_source(SPEC), targets))
    with pytest.raises(SchemeError, match=r"layers\.0\.mlp\.experts\.1\.gate_proj: expected .*group_size 32"):
        load_layers(tmp_path)


def test_an_expert_left_out_of_the_quantization_is_refused_by_name(tmp_path: Path) -> None:
    source = make_source(SPEC)
    source.config["quantization_config"]["ignore"].append("model.layers.0.mlp.experts.1.down_proj")
    write_source(tmp_path, source)
    with pytest.raises(SchemeError, match=r"left out .*layers\.0\.mlp\.experts\.1\.down_proj"):
        load_layers(tmp_path)


def test_an_expert_stored_plain_among_packed_ones_is_refused_by_name(tmp_path: Path) -> None:
    source = make_source(SPEC)
    name = "model.layers.0.mlp.experts.1.up_proj"
    plain = {f"{name}.weight": torch.randn(128, 64).bfloat16()}
    write_source(tmp_path, with_tensors(source, plain, without=(f"{name}.weight_",)))
    with pytest.raises(ExpertsError, match=r"layers\.0\.mlp\.experts: 2 problems") as found:
        load_layers(tmp_path)
    assert "1.up_proj.weight_packed" in str(found.value)
    assert "nothing uses: 1.up_proj.weight." in str(found.value)


def test_fp8_experts_alone_are_no_wna16_checkpoint(tmp_path: Path) -> None:
    source = make_source(SPEC)
    fp8 = {}
    for name, tensor in source.tensors.items():
        if name.endswith("weight_packed"):
            fp8[name.replace("_packed", "")] = torch.zeros(tensor.shape[0], 8, dtype=torch.float8_e4m3fn)
    write_source(tmp_path, with_tensors(source, fp8, without=("weight_packed", "weight_shape")))
    with pytest.raises(ExpertsError, match="This is no WNA16 MoE checkpoint"):
        load_layers(tmp_path)
