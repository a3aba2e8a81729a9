"""Experts modules found by their tensors."""

from __future__ import annotations

from pathlib import Path

import pytest

from checkpoints import CheckpointSpec, make_source, write_checkpoint
from compare_layer import as_expected
from marlin_moe import load_layers
from marlin_moe.repack.checkpoint import Checkpoint
from marlin_moe.repack.errors import ExpertsError
from marlin_moe.repack.experts.find import find_experts
from marlin_moe.repack.layers import linears, moe_layers
from mutations import drop_tensor

GATE_UP_DOWN = ("gate_proj", "up_proj", "down_proj")
W132 = ("w1", "w3", "w2")


def keys(module: str, triple: tuple[str, ...], experts: int = 3, field: str = "weight_packed") -> list[str]:
    prefix = f"{module}." if module else ""
    return [f"{prefix}{e}.{projection}.{field}" for e in range(experts) for projection in triple]


@pytest.mark.parametrize("prefix", ["model.layers", "language_model.model.layers", "layers", "a.b.c.blocks"])
@pytest.mark.parametrize(
    "path",
    ["mlp.experts", "block_sparse_moe.experts", "feed_forward.experts", "moe.routed", "ffn", "mlp.moe_3"],
)
@pytest.mark.parametrize("triple", [GATE_UP_DOWN, W132])
def test_any_place(triple: tuple[str, ...], path: str, prefix: str) -> None:
    module = f"{prefix}.7.{path}"
    found = find_experts([*keys(module, triple), f"{prefix}.7.self_attn.q_proj.weight_packed"])
    assert list(found) == [module]
    assert found[module].spelling.projections == triple
    assert found[module].experts == (0, 1, 2)
    assert found[module].quantized
    names = [tuple(f"{module}.{expert}.{projection}" for expert in range(3)) for projection in triple]
    assert list(linears(found[module])) == [dict(zip(("gate", "up", "down"), names, strict=True))]


def test_natural_order() -> None:
    names = [n for layer in (10, 9, 1) for n in keys(f"model.layers.{layer}.mlp.experts", GATE_UP_DOWN, 12)]
    found = find_experts(sorted(names))
    assert list(found) == [f"model.layers.{layer}.mlp.experts" for layer in (1, 9, 10)]
    assert found["model.layers.1.mlp.experts"].experts == tuple(range(12))


def test_names_below_the_module() -> None:
    found = find_experts(keys("", GATE_UP_DOWN))
    assert found[""].keys[0] == "0.gate_proj.weight_packed"
    assert find_experts(keys("m", GATE_UP_DOWN))["m"].keys == found[""].keys


@pytest.mark.parametrize(
    "name",
    [
        "visual.blocks.0.attn.qkv.weight_packed",  # a number, but what follows is no projection of an expert
        "visual.blocks.0.mlp.gate_proj.weight_packed",
        "model.layers.0.mlp.gate_proj.weight_packed",
        "model.layers.0.mlp.shared_experts.gate_proj.weight_packed",
        "vision_tower.encoder.blocks.0.norm0.weight",
        "model.layers.0.input_layernorm.weight",
    ],
)
def test_numbered_modules_that_are_no_experts(name: str) -> None:
    names = [name.replace("0", str(i), 1) for i in range(3)]
    names += [name.replace("gate_proj", other) for other in ("up_proj", "down_proj")]
    assert find_experts(names) == {}


def test_plain_experts_are_found_but_not_quantized() -> None:
    found = find_experts(keys("model.layers.61.mlp.experts", GATE_UP_DOWN, field="weight"))
    assert not found["model.layers.61.mlp.experts"].quantized


@pytest.mark.parametrize(
    ("triple", "seen"),
    [
        (("fc1", "fc2", "fc3"), "fc1, fc2, fc3"),
        (("gate_proj", "down_proj"), "down_proj, gate_proj"),
        (("w1", "w3"), "w1, w3"),
    ],
)
def test_an_unknown_triple_lists_what_was_seen(triple: tuple[str, ...], seen: str) -> None:
    names = keys("model.layers.0.mlp.experts", triple) + keys("model.layers.1.mlp.experts", triple)
    with pytest.raises(ExpertsError) as caught:
        find_experts(names)
    lines = str(caught.value).splitlines()
    assert lines.pop(0) == "experts: 2 problems."
    assert len(lines) == 2
    for layer, line in enumerate(lines):
        assert line.startswith(f"model.layers.{layer}.mlp.experts: expected experts with the projections")
        assert "gate_proj/up_proj/down_proj; w1/w3/w2" in line
        assert f"got {seen}." in line


@pytest.mark.parametrize("naming", ["qwen", "mixtral", "feed_forward", "lfm2"])
@pytest.mark.parametrize("prefix", ["model.layers", "language_model.model.layers"])
def test_whole_checkpoints(tmp_path: Path, naming: str, prefix: str) -> None:
    spec = CheckpointSpec(
        num_layers=3,
        num_experts=2,
        hidden_size=64,
        intermediate_size=64,
        naming=naming,
        prefix=prefix,
        extras=("attention", "norms", "router", "shared_experts", "dense_first", "mtp"),
    )
    source = write_checkpoint(tmp_path, spec)
    layers = load_layers(tmp_path)
    assert list(layers) == list(source.layers) == [spec.module(1), spec.module(2)]
    for module, layer in layers.items():
        as_expected(layer, source.layers[module])


def test_only(tmp_path: Path) -> None:
    source = write_checkpoint(
        tmp_path, num_layers=3, num_experts=1, hidden_size=64, intermediate_size=64, top_k=1
    )
    names = list(source.layers)
    assert list(load_layers(tmp_path, only=[names[2], names[0]])) == [names[0], names[2]]
    with pytest.raises(ExpertsError) as caught:
        load_layers(tmp_path, only=["model.layers.9.mlp.experts", names[0]])
    assert all(name in str(caught.value) for name in [*names, "got model.layers.9.mlp.experts."])


def test_a_checkpoint_without_packed_experts(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path, num_experts=1, hidden_size=64, intermediate_size=64)
    for name in source.tensors:
        if "experts" in name:
            drop_tensor(tmp_path, name)
    with (
        Checkpoint(tmp_path) as checkpoint,
        pytest.raises(ExpertsError, match=r"expected routed experts with packed weights.*got none among"),
    ):
        moe_layers(checkpoint)


@pytest.mark.parametrize("expert", [0, 1, 2])
def test_an_expert_missing_from_the_middle(tmp_path: Path, expert: int) -> None:
    source = write_checkpoint(tmp_path, num_experts=4, hidden_size=64, intermediate_size=64)
    (module,) = source.layers
    for name in source.tensors:
        if name.startswith(f"{module}.{expert}."):
            drop_tensor(tmp_path, name)
    with pytest.raises(
        ExpertsError, match=rf"{module}: expected experts 0 \.\. 3 .*got 3 .*without {expert}\."
    ):
        load_layers(tmp_path)


def test_every_missing_expert_is_named() -> None:
    source = make_source(CheckpointSpec(num_experts=6, hidden_size=64, intermediate_size=64))
    from marlin_moe import ExpertTensors, QuantScheme
    from marlin_moe.repack.check import expert_facts

    (module,) = source.layers
    left = {k: t for k, t in source.expert_tensors(module).items() if k.split(".")[0] in ("0", "5")}
    scheme = QuantScheme.from_config(source.config["quantization_config"], module)
    with pytest.raises(ExpertsError, match=r"got 2 experts without 1, 2, 3, 4\."):
        expert_facts(ExpertTensors.from_mapping(left), scheme)


def test_the_last_experts_missing(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path, num_experts=4, hidden_size=64, intermediate_size=64)
    (module,) = source.layers
    for name in source.tensors:
        if name.startswith(f"{module}.3."):
            drop_tensor(tmp_path, name)
    with pytest.raises(ExpertsError, match=rf"{module}: expected 4 experts.*config.json.*got 3"):
        load_layers(tmp_path)


def test_a_number_of_thousands_of_digits_is_no_expert() -> None:
    names = [f"experts.{'9' * 5000}.{p}.weight_packed" for p in ("gate_proj", "up_proj", "down_proj")]
    assert find_experts(names) == {}
