"""inspect_checkpoint against the made-up checkpoint's own numbers, and against the layers that are loaded."""

from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoints import CheckpointSpec, Source, write_checkpoint
from marlin_moe import repack_checkpoint
from marlin_moe.kernels.errors import LayerError
from marlin_moe.kernels.layer import MarlinMoELayer, Shard
from marlin_moe.repack.errors import CheckpointError, MarlinMoEError
from marlin_moe.repack.inspect import inspect_checkpoint
from marlin_moe.repack.inspect_report import InspectReport, LayerReport
from marlin_moe.repack.load import load_layers
from marlin_moe.repack.states import MatrixFacts
from mutations import drop_tensor, edit_config, replace_tensor

MODULE = "model.layers.0.mlp.experts"


def tensors_nbytes(layer: MarlinMoELayer) -> int:
    """Bytes of a layer without the expert map, which every rank makes anew."""
    return sum(tensor.nbytes for name, tensor in layer.tensors() if name != "expert_map")


def only_layer(report: InspectReport) -> LayerReport:
    assert report.ok, report.problems
    (layer,) = report.layers
    return layer


def test_a_layer_is_described_by_its_own_numbers(tmp_path: Path) -> None:
    source = write_checkpoint(
        tmp_path, num_experts=3, hidden_size=192, intermediate_size=96, symmetric=False, group_size=32
    )
    report = inspect_checkpoint(tmp_path)
    layer = only_layer(report)
    assert (layer.module, layer.num_experts) == (MODULE, 3)
    assert (layer.hidden_size, layer.intermediate_size, layer.padded_intermediate_size) == (192, 96, 128)
    assert layer.w13 == layer.w2 == MatrixFacts(bits=4, group_size=32, symmetric=False)
    assert (layer.scales_dtype, layer.biased) == ("BF16", False)
    assert layer.source_bytes == sum(t.nbytes for t in source.expert_tensors(MODULE).values())
    assert report.carried_tensors == len(source.other_tensors)
    assert report.carried_bytes == sum(t.nbytes for t in source.other_tensors.values())
    assert report.total_bytes == sum(t.nbytes for t in source.tensors.values())
    assert (report.packed, report.quant_method, report.num_files) == (False, "compressed-tensors", 1)


FORMATS: dict[str, dict[str, Any]] = {
    "padded": {"intermediate_size": 96, "hidden_size": 192},
    "zero points": {"symmetric": False, "group_size": 64},
    "int8": {"bits": 8, "symmetric": False},
    "per column": {"group_size": None},
    "w2 differs": {"down_bits": 8, "down_group_size": 64},
    "bias": {"bias": True, "dtype": torch.float16},
    "float32 scales": {"scale_dtype": torch.float32},
    "act-order": {"actorder": "group"},
}


@pytest.mark.parametrize("changes", FORMATS.values(), ids=FORMATS)
def test_packed_bytes_are_those_of_the_loaded_layer(tmp_path: Path, changes: dict[str, Any]) -> None:
    write_checkpoint(tmp_path, **changes)
    layer = only_layer(inspect_checkpoint(tmp_path))
    assert layer.packed_bytes == tensors_nbytes(load_layers(tmp_path)[MODULE])


@pytest.mark.parametrize("changes", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize(("tp", "ep"), [(1, 3), (2, 1), (3, 2), (4, 4), (8, 1)])
def test_the_split_is_what_the_ranks_then_hold(
    tmp_path: Path, changes: dict[str, Any], tp: int, ep: int
) -> None:
    write_checkpoint(tmp_path, **changes)
    report = inspect_checkpoint(tmp_path, tp=tp, ep=ep)
    split = report.layers[0].split
    if split.problem is not None:
        assert not report.ok
        assert report.problems == (split.problem,)
        assert tp not in split.tp_sizes
        with pytest.raises(MarlinMoEError, match=f"tp={tp}"):
            load_layers(tmp_path, tp=Shard(0, tp), ep=Shard(0, ep))
        return
    assert tp in split.tp_sizes
    ranks = [load_layers(tmp_path, tp=Shard(0, tp), ep=Shard(rank, ep))[MODULE] for rank in range(ep)]
    largest = max(ranks, key=lambda rank: rank.num_experts)
    assert split.rank_bytes == tensors_nbytes(largest)
    assert split.num_experts == largest.num_experts
    assert split.intermediate_size == largest.intermediate_size
    assert split.padded_intermediate_size == largest.padded_intermediate_size
    if largest.w2.num_groups > 1:
        assert split.w2_group_size == largest.w2.format.group_size
        assert split.regrouped == (split.w2_group_size != report.layers[0].w2.group_size)


def test_a_cut_group_is_said_to_be_regrouped(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, intermediate_size=192, group_size=64)
    split = only_layer(inspect_checkpoint(tmp_path, tp=2)).split
    assert (split.intermediate_size, split.padded_intermediate_size) == (96, 128)
    assert (split.w2_group_size, split.regrouped) == (32, True)
    assert split.tp_sizes == (1, 2, 3, 6)


def test_more_ranks_than_experts_do_not_fit(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, num_experts=3)
    report = inspect_checkpoint(tmp_path, ep=4)
    assert "3 experts for ep=4" in report.problems[0]
    assert report.layers[0].split.max_ep == 3


def test_an_error_of_one_layer_does_not_hide_the_others(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path, num_layers=3)
    drop_tensor(tmp_path, f"{source.spec.module(1)}.2.up_proj.weight_scale")
    report = inspect_checkpoint(tmp_path)
    assert [layer.module for layer in report.layers] == [source.spec.module(0), source.spec.module(2)]
    (refused,) = report.refused
    assert refused.module == source.spec.module(1)
    assert len(refused.problems) == 1
    assert "1.mlp.experts: expected 1 tensors more" in refused.problems[0]
    assert report.problems == refused.problems


def test_experts_of_unknown_spelling_do_not_hide_the_others(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path, num_layers=2)
    for expert in range(source.spec.num_experts):
        for field in ("weight_packed", "weight_scale", "weight_shape"):
            drop_tensor(tmp_path, f"{source.spec.module(0)}.{expert}.up_proj.{field}")
    report = inspect_checkpoint(tmp_path)
    assert [layer.module for layer in report.layers] == [source.spec.module(1)]
    assert [layer.module for layer in report.refused] == [source.spec.module(0)]
    assert "down_proj, gate_proj" in report.problems[0]


def test_experts_that_the_config_ignores_are_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    edit_config(tmp_path, lambda config: config["quantization_config"]["ignore"].append(f"re:{MODULE}.*"))
    report = inspect_checkpoint(tmp_path)
    assert not report.layers
    assert report.problems[0].startswith(f"{MODULE}: expected quantization_config to target its experts")


def test_a_checkpoint_without_quantization_config_is_refused_by_layer(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    edit_config(tmp_path, lambda config: config.pop("quantization_config"))
    report = inspect_checkpoint(tmp_path)
    assert report.quant_method is None
    assert "expected a quantization_config" in report.problems[0]


def test_plain_experts_are_carried_over(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path, extras=("mtp",))
    report = inspect_checkpoint(tmp_path)
    assert report.ok
    (plain,) = report.plain_layers
    names = [name for name in source.other_tensors if name.startswith(f"{plain.module}.")]
    assert names
    assert (plain.num_experts, plain.dtypes) == (source.spec.num_experts, ("BF16",))
    assert plain.source_bytes == sum(source.tensors[name].nbytes for name in names)
    assert report.carried_tensors == len(source.other_tensors)


def test_a_checkpoint_without_quantized_experts_is_a_problem(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path, num_experts=1)
    for name in source.expert_tensors(MODULE):
        drop_tensor(tmp_path, f"{MODULE}.{name}")
    report = inspect_checkpoint(tmp_path)
    assert not report.ok
    assert "no WNA16 MoE checkpoint" in report.problems[0]


def kill(path: Path, source: Source, projection: str, value: float) -> str:
    """Sets all scales of a projection; its name."""
    name = f"{source.spec.module(0)}.{projection}"
    replace_tensor(path, f"{name}.weight_scale", lambda scales: torch.full_like(scales, value))
    return name


def test_a_dead_expert_is_a_warning(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path)
    names = [kill(tmp_path, source, p, 0.0) for p in ("1.gate_proj", "3.down_proj")]
    report = inspect_checkpoint(tmp_path)
    assert only_layer(report).dead_projections == tuple(names)
    (warning,) = [text for text in report.warnings if "all zero" in text]
    assert all(name in warning for name in names)


def test_scales_that_only_begin_with_zeros_are_alive(tmp_path: Path) -> None:
    """The first 4 KiB are zero, and one value far behind them is not."""

    def almost_dead(scales: torch.Tensor) -> torch.Tensor:
        dead = torch.zeros_like(scales)
        dead[-1, -1] = 1.0
        return dead

    write_checkpoint(tmp_path, hidden_size=256, intermediate_size=512)
    name = f"{MODULE}.0.up_proj.weight_scale"
    replace_tensor(tmp_path, name, almost_dead)
    assert only_layer(inspect_checkpoint(tmp_path)).dead_projections == ()
    replace_tensor(tmp_path, name, torch.zeros_like)
    assert only_layer(inspect_checkpoint(tmp_path)).dead_projections == (f"{MODULE}.0.up_proj",)


def test_scales_that_are_nan_are_refused(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path)
    name = kill(tmp_path, source, "2.up_proj", float("nan"))
    report = inspect_checkpoint(tmp_path)
    assert not report.layers
    assert "NaN or Inf in 1 projections" in report.problems[0]
    assert name in report.problems[0]


@pytest.mark.parametrize(("hidden_size", "warned"), [(192, True), (256, False)])
def test_a_hidden_size_that_vllm_refuses_is_a_warning(tmp_path: Path, hidden_size: int, warned: bool) -> None:
    write_checkpoint(tmp_path, hidden_size=hidden_size, num_layers=2)
    report = inspect_checkpoint(tmp_path)
    assert report.ok
    assert [text for text in report.warnings if "vLLM" in text] == [
        f"hidden size {hidden_size} of {MODULE}, model.layers.1.mlp.experts is no multiple of 128, which "
        "vLLM's Marlin MoE kernel asks for; this package's op runs it"
    ] * warned


def test_files_that_are_no_part_of_the_checkpoint_are_named(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    (tmp_path / "expected.safetensors").write_bytes((tmp_path / "model.safetensors").read_bytes())
    report = inspect_checkpoint(tmp_path)
    assert report.left_out == ("expected.safetensors",)
    assert any("expected.safetensors" in warning for warning in report.warnings)


def test_sharded_checkpoints_count_their_files(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path, CheckpointSpec(num_layers=2, shards=3))
    report = inspect_checkpoint(tmp_path)
    assert report.num_files == 3
    assert len(report.layers) == 2
    assert report.total_bytes == sum(t.nbytes for t in source.tensors.values())


def test_a_directory_that_is_none_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nothing there"):
        inspect_checkpoint(tmp_path / "absent")


@pytest.mark.parametrize("sizes", [{"tp": 0}, {"ep": 0}])
def test_a_size_below_one_is_an_error(tmp_path: Path, sizes: dict[str, int]) -> None:
    with pytest.raises(LayerError, match="of 0"):
        inspect_checkpoint(tmp_path, **sizes)


SOURCES: dict[str, dict[str, Any]] = {
    "gptq": {"storage": "gptq"},
    "gptq, widened": {"storage": "gptq", "symmetric": False, "wrapped_zeros": True},
    "awq": {"storage": "awq", "symmetric": False},
    "fused": {"storage": "fused", "shards": 2},
    "fused-nested": {"storage": "fused-nested", "bias": True},
    "fused-apart": {"storage": "fused-apart"},
    "fused-transposed": {"storage": "fused-transposed", "symmetric": False},
}


@pytest.mark.filterwarnings("ignore:.*widened from 4 to 8 bits")
@pytest.mark.parametrize("changes", SOURCES.values(), ids=SOURCES)
def test_every_kind_of_source_is_described(tmp_path: Path, changes: dict[str, Any]) -> None:
    source = write_checkpoint(tmp_path / "source", **changes)
    repack_checkpoint(tmp_path / "source", tmp_path / "packed")
    for path in (tmp_path / "source", tmp_path / "packed"):
        report = inspect_checkpoint(path)
        layer = only_layer(report)
        method = changes["storage"] if changes["storage"] in ("gptq", "awq") else "compressed-tensors"
        assert (layer.quant_method, report.quant_method) == (method, method)
        assert layer.fused == changes["storage"].startswith("fused")
        bits = 8 if source.spec.wrapped_zeros else 4
        assert (layer.w13.bits, layer.w2.bits) == (bits, bits)
        assert (layer.w13_source_bits, layer.w2_source_bits) == (4, 4)
        assert layer.source_bytes == sum(t.nbytes for t in source.expert_tensors(MODULE).values())
        assert report.carried_tensors == len(source.other_tensors)
        assert report.carried_bytes == sum(t.nbytes for t in source.other_tensors.values())
        assert layer.packed_bytes == tensors_nbytes(load_layers(path)[MODULE])


@pytest.mark.parametrize("storage", ["fused", "fused-nested", "fused-apart", "fused-transposed"])
@pytest.mark.parametrize("value", [0.0, float("nan")])
def test_dead_experts_of_3d_tensors_are_told(tmp_path: Path, storage: str, value: float) -> None:
    """Up of expert 2 alone: half of its part where gate and up are fused."""
    source = write_checkpoint(tmp_path, storage=storage, hidden_size=64, intermediate_size=128)
    dot = ".weight_scale" if storage == "fused-nested" else "_scale"
    name = f"{MODULE}.{'up_proj' if storage == 'fused-apart' else 'gate_up_proj'}{dot}"

    def spoil(scales: torch.Tensor) -> torch.Tensor:
        changed = scales.clone()
        rows = changed[2].t() if storage == "fused-transposed" else changed[2]
        rows[-128:] = value
        return changed

    replace_tensor(tmp_path, name, spoil)
    report = inspect_checkpoint(tmp_path)
    assert len(source.layers) == 1
    if value == 0:
        assert only_layer(report).dead_projections == (f"{MODULE}.2.up_proj",)
        assert f"{MODULE}.2.up_proj" in report.warnings[0]
    else:
        (refused,) = report.refused
        assert f"NaN or Inf in 1 projections: {MODULE}.2.up_proj" in refused.problems[0]


@pytest.mark.parametrize("storage", ["fused", "fused-nested"])
def test_a_3d_layer_of_wrong_shapes_does_not_hide_the_others(tmp_path: Path, storage: str) -> None:
    write_checkpoint(tmp_path, storage=storage, num_layers=2)
    dot = ".weight_packed" if storage == "fused-nested" else "_packed"
    replace_tensor(tmp_path, f"{MODULE}.down_proj{dot}", lambda words: words[:, :, :-1])
    report = inspect_checkpoint(tmp_path)
    assert [layer.module for layer in report.refused] == [MODULE]
    assert "expected gate_up_proj" in report.refused[0].problems[0]
    assert [layer.module for layer in report.layers] == ["model.layers.1.mlp.experts"]
