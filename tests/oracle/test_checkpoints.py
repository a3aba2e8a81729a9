"""Made-up checkpoints against the public tools' own reading of them, and against the oracle's."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from safetensors import SafetensorError

from checkpoint_tensors import ct_tensors
from checkpoints import CheckpointSpec, make_source, quantization_config, tensors_of, write_checkpoint
from mutations import (
    INDEX,
    drop_tensor,
    edit_weights_config,
    file_of,
    flip_tensor_bit,
    rename_tensor,
    replace_tensor,
    tensor_of,
    truncate,
)
from oracle import Expert, Projection, expected_dense, expected_layer
from oracle_folder import read_experts, read_tensors
from strategies import checkpoint_specs

SPECS = {
    "plain": {},
    "two layers, asymmetric": {
        "symmetric": False,
        "num_layers": 2,
        "naming": "mixtral",
        "intermediate_size": 96,
    },
    "8 bits, one scale per column": {
        "bits": 8,
        "group_size": None,
        "symmetric": False,
        "dtype": torch.float16,
    },
    "w2 of its own": {"down_bits": 8, "down_group_size": None, "symmetric": False},
    "order": {"actorder": "group", "group_size": 64, "naming": "feed_forward", "bias": True},
    "shards": {"shards": 4, "symmetric": False, "prefix": "language_model.model.layers", "text_config": True},
    "int32 shape": {"weight_shape": torch.int32, "naming": "lfm2"},
    "gptq": {"storage": "gptq", "dtype": torch.float16},
    "gptq, order, asymmetric": {
        "storage": "gptq",
        "actorder": "group",
        "symmetric": False,
        "wrapped_zeros": True,
    },
    "gptq v2, 8 bits": {"storage": "gptq_v2", "bits": 8, "symmetric": False, "group_size": None},
    "awq": {"storage": "awq", "symmetric": False, "group_size": 128},
}


def explicit(projection: Projection) -> dict[str, torch.Tensor]:
    """Its tensors, with 2^(bits−1) and the trivial g_idx written out where they are absent."""
    middle = torch.full(projection.scales.shape, 1 << projection.bits - 1, dtype=torch.int32)
    trivial = (torch.arange(projection.values.shape[1]) // projection.group_size).int()
    tensors = {
        "values": projection.values,
        "scales": projection.scales,
        "zero_points": middle if projection.zero_points is None else projection.zero_points,
        "g_idx": trivial if projection.g_idx is None else projection.g_idx,
    }
    return tensors if projection.bias is None else tensors | {"bias": projection.bias}


def assert_same_experts(found: list[Expert], wanted: list[Expert]) -> None:
    assert len(found) == len(wanted)
    for number, (one, other) in enumerate(zip(found, wanted, strict=True)):
        for kind in ("gate", "up", "down"):
            read, written = getattr(one, kind), getattr(other, kind)
            assert read.bits == written.bits
            assert explicit(read).keys() == explicit(written).keys()
            for part, tensor in explicit(written).items():
                assert explicit(read)[part].dtype == tensor.dtype
                assert torch.equal(explicit(read)[part], tensor), f"expert {number} {kind} {part}"


@pytest.mark.parametrize("name", SPECS)
def test_written_integers_are_read(name: str, tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "checkpoint", **SPECS[name])
    assert len(source.layers) == source.spec.num_layers
    for module, experts in source.layers.items():
        assert_same_experts(read_experts(tmp_path / "checkpoint", module), experts)
        dense = [expert.gate.dense() for expert in experts]
        assert not torch.equal(dense[0], dense[1]), "experts differ"
    stored = read_tensors(tmp_path / "checkpoint")
    assert stored.keys() == source.tensors.keys()
    assert all(torch.equal(stored[key], tensor) for key, tensor in source.tensors.items())
    again = tensors_of(source.spec)
    assert all(torch.equal(again[key], tensor) for key, tensor in source.tensors.items())
    below = {f"{m}.{key}" for m in source.layers for key in source.expert_tensors(m)}
    assert below | source.other_tensors.keys() == source.tensors.keys()
    assert not below & source.other_tensors.keys()


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group_size", [32, 128, None])
@pytest.mark.parametrize("symmetric", [True, False])
def test_compressed_tensors_reads_the_same(bits: int, group_size: int | None, symmetric: bool) -> None:
    """Float32 scales, so that its product in the scales' dtype is the exact one rounded once, as here."""
    from compressed_tensors.compressors.pack_quantized import PackedQuantizationCompressor
    from compressed_tensors.quantization import QuantizationScheme

    spec = CheckpointSpec(bits=bits, group_size=group_size, symmetric=symmetric, scale_dtype=torch.float32)
    source = make_source(spec)
    (config,) = quantization_config(spec)["config_groups"].values()
    scheme = QuantizationScheme.model_validate(config)
    (experts,) = source.layers.values()
    for expert in experts[:2]:
        for projection in (expert.gate, expert.down):
            state = PackedQuantizationCompressor.decompress(ct_tensors(projection, spec), scheme)
            assert torch.equal(state["weight"], projection.dense())
            again = PackedQuantizationCompressor.compress(state, scheme)
            assert torch.equal(again["weight_packed"], ct_tensors(projection, spec)["weight_packed"])


def test_compressed_tensors_converts_awq_to_the_same() -> None:
    from compressed_tensors.entrypoints.convert.converters.autoawq import AutoAWQConverter

    spec = CheckpointSpec(storage="awq", symmetric=False, group_size=64)
    source = make_source(spec)
    converter = AutoAWQConverter.from_autoawq_config(source.config["quantization_config"])
    converted = converter.process(dict(source.tensors))
    plain = tensors_of(dataclasses.replace(spec, storage="compressed-tensors"))
    assert converted.keys() == plain.keys()
    for name, tensor in plain.items():
        assert torch.equal(converted[name].to(tensor.dtype), tensor), name


@pytest.mark.parametrize(
    ("storage", "packed", "scale"),
    [("fused", "_packed", "_scale"), ("fused-nested", ".weight_packed", ".weight_scale")],
)
def test_fused_experts_are_the_same_rows(storage: str, packed: str, scale: str) -> None:
    spec = CheckpointSpec(symmetric=False, intermediate_size=96)
    plain, fused = make_source(spec), make_source(dataclasses.replace(spec, storage=storage))
    (module,) = plain.layers
    below, single = fused.expert_tensors(module), plain.expert_tensors(module)
    assert below[f"gate_up_proj{packed}"].shape == (4, 192, 16)
    assert below[f"down_proj{packed}"].shape == (4, 128, 12)
    for e in range(4):
        for ours, theirs in ((packed, "weight_packed"), (scale, "weight_scale")):
            assert torch.equal(below[f"gate_up_proj{ours}"][e, :96], single[f"{e}.gate_proj.{theirs}"])
            assert torch.equal(below[f"gate_up_proj{ours}"][e, 96:], single[f"{e}.up_proj.{theirs}"])
            assert torch.equal(below[f"down_proj{ours}"][e], single[f"{e}.down_proj.{theirs}"])


def test_everything_around_the_experts() -> None:
    extras = ("quantized_attention", "embeddings", "norms", "router", "shared_experts", "dense_first", "mtp")
    source = make_source(CheckpointSpec(num_layers=2, extras=extras))
    assert list(source.layers) == ["model.layers.1.mlp.experts"]
    others = source.other_tensors
    for name in (
        "model.layers.0.mlp.gate_proj.weight",
        "model.layers.1.mlp.shared_experts.down_proj.weight",
        "model.layers.1.self_attn.q_proj.weight_packed",
        "model.layers.2.mlp.experts.3.down_proj.weight",
    ):
        assert name in others
    groups = source.config["quantization_config"]["config_groups"]
    assert [group["weights"]["num_bits"] for group in groups.values()] == [8, 4]


@given(spec=checkpoint_specs(actorder=True, mixed=True))
@settings(max_examples=12, deadline=None)
def test_any_drawn_checkpoint_has_an_expected_layer(spec: CheckpointSpec) -> None:
    (experts,) = make_source(spec).layers.values()
    layer = expected_layer(experts)
    w13, w2 = expected_dense(experts)
    assert w13.shape == (spec.num_experts, 2 * spec.intermediate_size, spec.hidden_size)
    assert (layer.w13.sort_order is not None) == (spec.actorder in ("group", "dynamic", "true"))
    size = spec.intermediate_size
    order = torch.arange(size).expand(spec.num_experts, size)
    if layer.intermediate_order is not None:
        order = layer.intermediate_order.long()
    assert torch.equal(layer.w2.dense()[:, :, :size], w2.gather(2, order[:, None].expand_as(w2)))


NAME = "model.layers.0.mlp.experts.2.up_proj.weight_scale"


@pytest.mark.parametrize("shards", [1, 3])
def test_mutations_change_one_thing(shards: int, tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path, shards=shards)

    def stored(name: str = NAME) -> torch.Tensor:
        return tensor_of(tmp_path, name)

    def indexed() -> Any:
        return (
            json.loads((tmp_path / INDEX).read_text())["weight_map"] if shards > 1 else read_tensors(tmp_path)
        )

    flip_tensor_bit(tmp_path, NAME, -1, 7)
    assert (stored() != source.tensors[NAME]).nonzero().tolist() == [[127, 3]]
    flip_tensor_bit(tmp_path, NAME, -1, 7)
    replace_tensor(tmp_path, NAME, lambda scale: scale.half())
    assert torch.equal(stored(), source.tensors[NAME].half())
    rename_tensor(tmp_path, NAME, "elsewhere")
    assert NAME not in indexed()
    assert torch.equal(stored("elsewhere"), source.tensors[NAME].half())
    drop_tensor(tmp_path, "elsewhere", index=False)
    assert ("elsewhere" in indexed()) == (shards > 1)
    assert read_tensors(tmp_path).keys() == source.tensors.keys() - {NAME}
    edit_weights_config(tmp_path, group_size=64)
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert config["config_groups"]["group_0"]["weights"]["group_size"] == 64
    truncate(file_of(tmp_path, NAME.replace("up", "gate")), 1)
    with pytest.raises(SafetensorError):
        read_tensors(tmp_path)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"naming": "gpt"}, "naming"),
        ({"extras": ("vision",)}, "extras"),
        ({"intermediate_size": 100}, "100 columns"),
        ({"group_size": 48}, "groups of 48"),
        ({"storage": "awq"}, "AWQ has zero points"),
        ({"actorder": "group", "group_size": None}, "no order"),
    ],
)
def test_specs_that_no_tool_writes(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        CheckpointSpec(**changes)
