"""What has gone wrong with such checkpoints in the field: the right value, or an error by name."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoints import CheckpointSpec, write_checkpoint
from compare_layer import as_expected
from marlin_moe import MarlinMoEWarning, Shard, load_layers, repack_checkpoint
from marlin_moe.kernels.errors import MarlinMoEError
from marlin_moe.repack.errors import CheckpointError, ExpertsError, SchemeError, ShardError
from mutations import (
    INDEX,
    drop_tensor,
    edit_config,
    edit_json,
    edit_weights_config,
    files_of,
    rename_tensor,
    replace_tensor,
)

SMALL = CheckpointSpec(num_experts=2, hidden_size=64, intermediate_size=64, extras=("router",))
EXPERTS = "model.layers.0.mlp.experts"


def refused(path: Path, error: type[MarlinMoEError], match: str) -> None:
    """Neither loading nor repacking takes it, and repacking leaves nothing that loads."""
    with pytest.raises(error, match=match):
        load_layers(path)
    with pytest.raises(error, match=match):
        repack_checkpoint(path, path.parent / "packed")
    with pytest.raises(MarlinMoEError):
        load_layers(path.parent / "packed")


@pytest.mark.parametrize("actorder", ["weight", "static"])
@pytest.mark.parametrize("rank", [0, 1])
def test_an_order_that_is_not_grouped_needs_no_g_idx(tmp_path: Path, actorder: str, rank: int) -> None:
    source = write_checkpoint(tmp_path, SMALL, intermediate_size=768, actorder=actorder, group_size=32)
    layer = load_layers(tmp_path, tp=Shard(rank, 2))[EXPERTS]
    as_expected(layer, source.layers[EXPERTS], tp_rank=rank, tp_size=2)
    assert layer.w2.format.group_size == 32
    assert layer.w2.scales.shape == (2, 384 // 32, 64)


@pytest.mark.parametrize("actorder", ["group", "dynamic", "true", True])
def test_a_grouped_order_without_g_idx_is_refused(tmp_path: Path, actorder: str | bool) -> None:
    write_checkpoint(tmp_path / "source", SMALL)
    edit_weights_config(tmp_path / "source", actorder=actorder)
    refused(tmp_path / "source", ExpertsError, r"mlp\.experts: .*act-order.*0\.gate_proj\.weight_g_idx")


def test_scales_of_w2_are_cut_along_k_with_the_weights(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path, SMALL, intermediate_size=512, group_size=64)
    for rank in range(4):
        layer = load_layers(tmp_path, tp=Shard(rank, 4))[EXPERTS]
        as_expected(layer, source.layers[EXPERTS], tp_rank=rank, tp_size=4)
        groups = layer.w2.scales.shape[1]
        assert groups * layer.w2.format.group_size == layer.intermediate_size == 128


def test_a_group_size_in_the_config_that_the_scales_deny(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "source", SMALL, hidden_size=128, intermediate_size=128, group_size=64)
    edit_weights_config(tmp_path / "source", group_size=128)
    match = r"gate_proj\.weight_scale: expected \(128, 1\).*group_size 128.*group_0.*got \(128, 2\)"
    refused(tmp_path / "source", ExpertsError, match)


@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_missing_shard_is_named(tmp_path: Path, number: int) -> None:
    write_checkpoint(tmp_path / "source", SMALL, shards=3)
    gone = files_of(tmp_path / "source")[number]
    gone.unlink()
    refused(tmp_path / "source", CheckpointError, rf"{gone.name}: .*No such file")


def test_a_shard_missing_from_the_index_too(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "source", SMALL, shards=3, num_layers=2)
    gone = files_of(tmp_path / "source")[1]
    gone.unlink()

    def forget(index: dict) -> None:  # type: ignore[type-arg]
        index["weight_map"] = {name: file for name, file in index["weight_map"].items() if file != gone.name}

    edit_json(tmp_path / "source" / INDEX, forget)
    refused(tmp_path / "source", ExpertsError, r"mlp\.experts.*(got none of|got nothing)")


def test_a_second_set_of_shards(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "source", SMALL, shards=2)
    write_checkpoint(tmp_path / "other", SMALL, shards=3)
    for file in files_of(tmp_path / "other"):
        (tmp_path / "source" / file.name).write_bytes(file.read_bytes())
    refused(tmp_path / "source", CheckpointError, r"model-00001-of-00003\.safetensors, .*second or older set")


def test_an_expert_under_a_name_that_nothing_maps(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "source", SMALL)
    for part in ("weight_packed", "weight_scale", "weight_shape"):
        rename_tensor(tmp_path / "source", f"{EXPERTS}.1.up_proj.{part}", f"{EXPERTS}.1.up_projection.{part}")
    refused(
        tmp_path / "source", ExpertsError, r"(?s)none of 1\.up_proj\..*nothing uses: .*1\.up_projection\."
    )


def test_all_experts_skipped(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "source", SMALL)
    for expert in range(2):
        for projection in ("gate_proj", "up_proj", "down_proj"):
            for part in ("weight_packed", "weight_scale", "weight_shape"):
                drop_tensor(tmp_path / "source", f"{EXPERTS}.{expert}.{projection}.{part}")
    refused(tmp_path / "source", ExpertsError, "expected routed experts with packed weights .* got none")


@pytest.mark.parametrize("value", [torch.nan, torch.inf, 0.0])
def test_an_expert_that_calibration_never_reached(tmp_path: Path, value: float) -> None:
    write_checkpoint(tmp_path / "source", SMALL)
    name = f"{EXPERTS}.1.down_proj.weight_scale"
    replace_tensor(tmp_path / "source", name, lambda scales: torch.full_like(scales, value))
    refused(tmp_path / "source", ExpertsError, rf"{name}: expected finite .*Calibration never reached")


def test_one_scale_per_column_with_a_group_size_of_null(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path, SMALL, group_size=None, symmetric=False)
    weights = source.config["quantization_config"]["config_groups"]["group_0"]["weights"]
    assert weights["group_size"] is None
    layer = load_layers(tmp_path)[EXPERTS]
    as_expected(layer, source.layers[EXPERTS])
    assert (layer.w13.format.group_size, layer.w2.format.group_size) == (None, None)


def test_8_bits_in_groups_of_128(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path, SMALL, bits=8, group_size=128, hidden_size=128, intermediate_size=256)
    as_expected(load_layers(tmp_path)[EXPERTS], source.layers[EXPERTS])


@pytest.mark.parametrize("given", [None, torch.int32, torch.int64])
def test_weight_shape_may_be_missing(tmp_path: Path, given: torch.dtype | None) -> None:
    source = write_checkpoint(tmp_path, SMALL, weight_shape=given)
    as_expected(load_layers(tmp_path)[EXPERTS], source.layers[EXPERTS])


def test_a_weight_shape_that_disagrees(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "source", SMALL)
    name = f"{EXPERTS}.0.up_proj.weight_shape"
    replace_tensor(tmp_path / "source", name, lambda shape: shape + 64)
    refused(tmp_path / "source", ExpertsError, rf"{name}: expected \[64, 64\] .* got \[128, 128\]")


def test_fp16_scales_in_a_bf16_model_are_converted_once_and_said(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path, SMALL, scale_dtype=torch.float16)
    with pytest.warns(MarlinMoEWarning, match=r"float16 to torch\.bfloat16") as warned:
        layer = load_layers(tmp_path, dtype=torch.bfloat16)[EXPERTS]
    assert len(warned) == 1
    expert = source.layers[EXPERTS][1]
    scales = expert.down.scales.bfloat16().float()
    values = (expert.down.values - 8).float()
    _, w2 = layer.dequantize(experts=[1])
    assert torch.equal(w2[0], values * scales.repeat_interleave(32, dim=1))


def test_a_slice_that_cuts_groups_is_regrouped_exactly(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path, SMALL, hidden_size=128, intermediate_size=640, group_size=128)
    for rank in range(2):
        layer = load_layers(tmp_path, tp=Shard(rank, 2))[EXPERTS]
        as_expected(layer, source.layers[EXPERTS], tp_rank=rank, tp_size=2)
        assert (layer.intermediate_size, layer.w2.format.group_size) == (320, 64)


def test_a_slice_that_cannot_be_regrouped_names_the_sizes_that_work(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, SMALL, hidden_size=128, intermediate_size=384, group_size=128)
    with pytest.raises(
        ShardError, match=r"384 .*tp=8.* 48 cuts groups of 128.*work: 1, 2, 3, 4, 6, 12\."
    ) as found:
        load_layers(tmp_path, tp=Shard(0, 8))
    assert "up to 2" in str(found.value)


@pytest.mark.parametrize(("size", "tp"), [(672, 1), (1344, 2), (928, 2), (1856, 1)])
@pytest.mark.parametrize("group_size", [32, None])
def test_slices_that_are_no_whole_tiles(tmp_path: Path, size: int, tp: int, group_size: int | None) -> None:
    if group_size and size // tp % group_size:
        group_size = None
    source = write_checkpoint(tmp_path, SMALL, intermediate_size=size, group_size=group_size)
    layer = load_layers(tmp_path, tp=Shard(tp - 1, tp))[EXPERTS]
    as_expected(layer, source.layers[EXPERTS], tp_rank=tp - 1, tp_size=tp)


def test_a_slice_of_one_group_has_the_order_of_one_group(tmp_path: Path) -> None:
    """w2 has one group on a rank, w13 several: each has its own order of scales."""
    source = write_checkpoint(tmp_path, SMALL, hidden_size=256, intermediate_size=128, group_size=64)
    layer = load_layers(tmp_path, tp=Shard(1, 2))[EXPERTS]
    as_expected(layer, source.layers[EXPERTS], tp_rank=1, tp_size=2)
    assert (layer.w13.format.group_size, layer.w2.format.group_size) == (64, None)


def test_a_packed_checkpoint_says_that_it_is_one(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "source", SMALL)
    repack_checkpoint(tmp_path / "source", tmp_path / "packed")
    config = json.loads((tmp_path / "packed" / "config.json").read_text())
    assert config["quantization_config"] == {"quant_method": "marlin_moe", "version": 1}
    source_config = (tmp_path / "packed" / "source_config.json").read_bytes()
    assert source_config == (tmp_path / "source" / "config.json").read_bytes()
    with pytest.raises(MarlinMoEError, match="already packed"):
        repack_checkpoint(tmp_path / "packed", tmp_path / "twice")


def test_a_tensor_of_another_layer_under_this_ones_name(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "source", SMALL, shards=2, num_layers=2)
    first, second = files_of(tmp_path / "source")
    os.replace(second, tmp_path / "held")
    second.write_bytes(first.read_bytes())
    refused(tmp_path / "source", CheckpointError, r"expected in one file, got it in model-00001")


def test_a_pointer_instead_of_a_file(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "source", SMALL)
    (tmp_path / "source" / "model.safetensors").write_text("version https://git-lfs/spec/v1\nsize 4998\n")
    refused(tmp_path / "source", CheckpointError, r"model\.safetensors: .*Git LFS pointer.*git lfs pull")


def test_the_group_size_that_fits_is_told(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "source", SMALL, hidden_size=128, group_size=64)
    edit_weights_config(tmp_path / "source", group_size=32)
    refused(
        tmp_path / "source", ExpertsError, r"0\.gate_proj\.weight_scale: .* These scales fit group_size 64\."
    )


def test_more_experts_per_token_than_there_are(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "source", SMALL, top_k=3)
    refused(
        tmp_path / "source",
        ExpertsError,
        r"mlp\.experts: expected at most 2 .*3 in config\.json \(num_experts_per_tok",
    )


def test_a_router_whose_experts_are_gone_is_named(tmp_path: Path) -> None:
    """The whole layer is missing, from the file too: only its router tells."""
    write_checkpoint(tmp_path, num_layers=3, num_experts=2, hidden_size=64, intermediate_size=64)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    for layer in range(3):
        tensors[f"model.layers.{layer}.mlp.gate.weight"] = torch.ones(2, 64)
    kept = {name: tensor for name, tensor in tensors.items() if "layers.1.mlp.experts" not in name}
    save_file(kept, file)
    with pytest.raises(
        ExpertsError, match=r"beside model\.layers\.1\.mlp\.gate\.weight\. A shard is missing"
    ):
        load_layers(tmp_path)


def test_experts_of_another_kind_beside_a_router_are_no_loss(tmp_path: Path) -> None:
    """An MTP layer keeps its experts as plain 3-D tensors."""
    write_checkpoint(tmp_path, num_layers=1, num_experts=2, hidden_size=64, intermediate_size=64)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    for layer in range(2):
        tensors[f"model.layers.{layer}.mlp.gate.weight"] = torch.ones(2, 64)
    tensors["model.layers.1.mlp.experts.gate_up_proj"] = torch.ones(2, 128, 64)
    save_file(tensors, file)
    assert list(load_layers(tmp_path)) == ["model.layers.0.mlp.experts"]


HADAMARD = {"type": "hadamard", "apply": [{"targets": ["re:.*down_proj$"], "location": "input"}]}


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        (
            "transform_config",
            {"config_groups": {"R4": HADAMARD}},
            r"transforms of their input.*R4 \(hadamard\)",
        ),
        ("sparsity_config", {"format": "sparse-24-bitmask"}, r"sparsity_config.*got 'sparse-24-bitmask'"),
        ("format", "marlin-24", r"format: expected pack-quantized, got marlin-24"),
    ],
)
def test_what_changes_the_meaning_of_the_weights_is_refused(
    tmp_path: Path, key: str, value: object, message: str
) -> None:
    write_checkpoint(tmp_path, num_experts=2, hidden_size=64, intermediate_size=64)
    edit_config(tmp_path, lambda config: config["quantization_config"].update({key: value}))
    with pytest.raises(SchemeError, match=message):
        load_layers(tmp_path)
