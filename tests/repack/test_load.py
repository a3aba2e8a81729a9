"""load_layers on checkpoints of public tools: exact values, the Marlin reference's bytes, the op's output."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoint_spec import CheckpointSpec
from checkpoints import write_checkpoint
from compare_layer import as_expected, equal_bytes, same_layer
from folders import checkpoint_folders, golden
from marlin_moe import MarlinMoELayer, Shard, fused_marlin_moe, load_layers
from marlin_moe.kernels.errors import LayerError, MarlinMoEError
from marlin_moe.repack.errors import CheckpointError, ExpertsError, SchemeError, ShardError
from oracle import Expert, Projection, Refused, expected_layer
from oracle_folder import PROJECTION_NAMES, ExpectedValues, read_expected, read_experts, sha256

FOLDERS = checkpoint_folders()
SPLITS = [(2, 2), (4, 1), (1, 4)]


def name_of(path: Path) -> str:
    return path.name


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got.double() - expected.double()).norm() / expected.double().norm())


def dense_hashes(layers: dict[str, MarlinMoELayer], expected: ExpectedValues) -> dict[str, str]:
    """{name as in expected.json: hash} of every projection of every expert."""
    found: dict[str, str] = {}
    for module, layer in layers.items():
        w13, w2 = layer.dequantize()
        gates, ups = w13.chunk(2, dim=1)
        for expert in range(layer.num_experts):
            for kind, stacked in (("gate", gates), ("up", ups), ("down", w2)):
                names = [f"{module}.{expert}.{spelling}.weight" for spelling in PROJECTION_NAMES[kind]]
                (name,) = [name for name in names if name in expected.dense_sha256]
                found[name] = sha256(stacked[expert])
    return found


@pytest.mark.parametrize("folder", FOLDERS, ids=name_of)
def test_every_projection_has_the_exact_values(folder: Path) -> None:
    expected = read_expected(folder)
    assert dense_hashes(load_layers(folder), expected) == expected.dense_sha256


@pytest.mark.parametrize("folder", FOLDERS, ids=name_of)
def test_the_bytes_of_the_marlin_reference(folder: Path) -> None:
    expected = read_expected(folder)
    if not expected.marlin_sha256:
        pytest.skip("no Marlin hashes here")
    layer = load_layers(folder, only=[expected.module])[expected.module]
    found = {name.replace(".", "_"): tensor for name, tensor in layer.tensors()}
    for name, tensor in expected.marlin.items():
        equal_bytes(found[name], tensor, name)
    assert {name: sha256(found[name]) for name in expected.marlin_sha256} == expected.marlin_sha256
    assert found.keys() == expected.marlin_sha256.keys()


def expected_refusal(experts: list[Expert], tp: int) -> bool:
    """Whether the oracle finds no exact cut."""
    try:
        expected_layer(experts[:1], tp_size=tp)
    except Refused:
        return True
    return False


@pytest.mark.parametrize("folder", FOLDERS, ids=name_of)
def test_the_ops_output_and_that_of_all_ranks_together(folder: Path) -> None:
    expected = read_expected(folder)
    experts = read_experts(folder, expected.module)
    x, weights, ids = expected.x, expected.topk_weights, expected.topk_ids

    def run(dtype: torch.dtype = torch.float32, **rank: Shard) -> torch.Tensor:
        (layer,) = load_layers(folder, only=[expected.module], **rank).values()  # type: ignore[arg-type]
        return fused_marlin_moe(x.to(dtype), layer, weights, ids).double()

    assert relative_error(run(), expected.y) < 1e-5
    assert relative_error(run(torch.bfloat16), expected.y) < 1e-2
    for tp, ep in SPLITS:
        ranks = [{"tp": Shard(t, tp), "ep": Shard(e, ep)} for t, e in product(range(tp), range(ep))]
        if expected_refusal(experts, tp):
            with pytest.raises(ShardError, match="TP sizes that work"):
                run(**ranks[0])
            continue
        total = torch.stack([run(**rank) for rank in ranks]).sum(0)
        assert relative_error(total, expected.y) < 1e-5, f"TP {tp} x EP {ep}"


def without_middle_zeros(expert: Expert) -> Expert:
    """GPTQ stores the zero points of symmetric weights, each 2^(bits−1): a symmetric layer has none."""

    def strip(projection: Projection) -> Projection:
        zeros = projection.zero_points
        assert zeros is None or (zeros == 1 << projection.bits - 1).all()
        return replace(projection, zero_points=None)

    return Expert(gate=strip(expert.gate), up=strip(expert.up), down=strip(expert.down))


@pytest.mark.parametrize("folder", FOLDERS, ids=name_of)
@pytest.mark.parametrize(("tp", "ep"), [(2, 1), (4, 2)])
def test_a_rank_of_a_real_checkpoint_is_the_oracles(folder: Path, tp: int, ep: int) -> None:
    expected = read_expected(folder)
    experts = read_experts(folder, expected.module)
    rank = {"tp_rank": tp - 1, "tp_size": tp, "ep_rank": ep - 1, "ep_size": ep}
    shards = {"tp": Shard(tp - 1, tp), "ep": Shard(ep - 1, ep)}

    def load() -> MarlinMoELayer:
        return load_layers(folder, only=[expected.module], **shards)[expected.module]  # type: ignore[arg-type]

    try:
        layer = load()
    except ShardError:
        with pytest.raises(Refused):
            as_expected(load_layers(folder)[expected.module], experts, **rank)
        return
    if layer.w13.format.symmetric:
        experts = [without_middle_zeros(expert) for expert in experts]
    # GPTQ stores a g_idx for every column, also where columns are in order: the layer needs none then.
    as_expected(layer, experts, act_order=layer.w13.sort_order is not None, **rank)


def test_options_reach_the_layer() -> None:
    folder = golden("qwen3moe-inter96-g32")
    plain, other = load_layers(folder), load_layers(folder, max_tokens=16, top_k=4)
    for name, layer in plain.items():
        assert (layer.top_k, layer.max_tokens) == (2, 8192)
        assert (other[name].top_k, other[name].max_tokens) == (4, 16)
        assert layer.workspace is not None
    with pytest.raises(LayerError, match="top_k: expected 1"):
        load_layers(folder, top_k=0)
    with pytest.raises(TypeError, match="tp: expected a Shard, got tuple"):
        load_layers(folder, tp=(0, 1))  # type: ignore[arg-type]


def test_dtype_is_that_of_the_scales() -> None:
    folder = golden("qwen3moe-w4a16-asym-g128")
    with pytest.warns(UserWarning, match="scales are converted once, from torch.bfloat16 to torch.float32"):
        layers = load_layers(folder, dtype=torch.float32)
    for name, layer in load_layers(folder).items():
        assert layer.scales_dtype == torch.bfloat16
        assert layers[name].scales_dtype == torch.float32
        for got, exact in zip(layers[name].dequantize(), layer.dequantize(), strict=True):
            equal_bytes(got, exact, name)


def test_the_path_may_be_text_and_the_device_too(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, CheckpointSpec(num_experts=2, hidden_size=64, intermediate_size=64))
    (layer,) = load_layers(str(tmp_path), "cpu").values()
    (again,) = load_layers(tmp_path, torch.device("cpu")).values()
    same_layer(layer, again)


def test_packed_experts_that_the_config_ignores(tmp_path: Path) -> None:
    from mutations import edit_config

    write_checkpoint(tmp_path, CheckpointSpec(num_experts=2, hidden_size=64, intermediate_size=64))
    edit_config(tmp_path, lambda config: config["quantization_config"].update(ignore=["re:.*experts.*"]))
    with pytest.raises(
        SchemeError, match=r"layers\.0\.mlp\.experts: expected quantization_config to target its exp"
    ):
        load_layers(tmp_path)


def test_quantized_attention_is_group_0(tmp_path: Path) -> None:
    """Groups are renumbered on save: INT8 attention first, INT4 experts second."""
    extras = ("quantized_attention", "router", "shared_experts", "mtp", "dense_first")
    source = write_checkpoint(
        tmp_path,
        CheckpointSpec(num_layers=2, num_experts=2, hidden_size=64, intermediate_size=64, extras=extras),
    )
    layers = load_layers(tmp_path)
    assert layers.keys() == source.layers.keys()
    for name, layer in layers.items():
        assert layer.w13.format.bits == 4
        as_expected(layer, source.layers[name])


def test_every_error_is_a_marlin_moe_error(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "gone", Path(__file__)):
        with pytest.raises(MarlinMoEError, match=str(path)):
            load_layers(path)


@pytest.mark.parametrize("only", ["model.layers.0.mlp.experts", 5, [5]])
def test_only_takes_a_list_of_names(tmp_path: Path, only: Any) -> None:
    with pytest.raises(TypeError, match=r"^only: "):
        load_layers(tmp_path, only=only)


def test_paths_and_devices_that_there_are_not(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="expected a checkpoint directory"):
        load_layers("x" * 5000)
    with pytest.raises(MarlinMoEError, match=r"device: expected a device that there is.*bogus"):
        load_layers(tmp_path, "bogus")


def test_a_dtype_that_marlin_has_not_is_called_by_its_name(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, CheckpointSpec(num_experts=2, hidden_size=64, intermediate_size=64))
    file = tmp_path / "model.safetensors"
    content = file.read_bytes()
    start = content.index(b'.experts.1.down_proj.weight_packed":')
    file.write_bytes(content[:start] + content[start:].replace(b'"I32"', b'"U32"', 1))
    with pytest.raises(ExpertsError, match=r"1\.down_proj\.weight_packed: expected I32, got U32"):
        load_layers(tmp_path)
