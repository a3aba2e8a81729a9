"""A checkpoint directory: which files are read, and every directory that is refused."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from checkpoints import CheckpointSpec, write_checkpoint
from compare_layer import as_expected, equal_bytes
from folders import golden
from marlin_moe import load_layers
from marlin_moe.repack.checkpoint import Checkpoint
from marlin_moe.repack.errors import CheckpointError
from mutations import INDEX, drop_tensor, edit_config, edit_json, file_of, rename_tensor, truncate

SPEC = CheckpointSpec(num_experts=2, hidden_size=64, intermediate_size=64)


@pytest.mark.parametrize("shards", [1, 2, 5])
def test_every_tensor_of_every_file(tmp_path: Path, shards: int) -> None:
    source = write_checkpoint(tmp_path, SPEC, shards=shards)
    with Checkpoint(tmp_path) as checkpoint:
        assert set(checkpoint.tensors) == set(source.tensors)
        assert len(checkpoint.files) == shards
        assert checkpoint.left_out == []
        assert checkpoint.top_k == 2
        assert checkpoint.num_experts == {2}
        for name, tensor in source.tensors.items():
            equal_bytes(checkpoint.read(name), tensor, name)
            assert checkpoint.tensors[name].torch_dtype == tensor.dtype
    layers = load_layers(tmp_path)
    assert layers.keys() == source.layers.keys()
    for module, experts in source.layers.items():
        as_expected(layers[module], experts)


def test_text_config(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path, SPEC, text_config=True, prefix="language_model.model.layers")
    with Checkpoint(tmp_path) as checkpoint:
        assert "quantization_config" not in checkpoint.config
        assert checkpoint.quantization_config == source.config["text_config"]["quantization_config"]
        assert (checkpoint.top_k, checkpoint.num_experts) == (2, {2})
    (layer,) = load_layers(tmp_path).values()
    assert layer.top_k == 2
    as_expected(layer, next(iter(source.layers.values())))


def test_the_top_levels_quantization_config_wins(single: Path) -> None:
    edit_config(single, lambda config: config.update(text_config={"quantization_config": {"bits": 1}}))
    with Checkpoint(single) as checkpoint:
        assert "config_groups" in checkpoint.quantization_config


def test_the_only_file_may_have_any_name(single: Path) -> None:
    (single / "model.safetensors").rename(single / "weights.safetensors")
    assert len(load_layers(single)) == 1


def test_other_safetensors_are_left_out_and_named(single: Path, sharded: Path) -> None:
    for path in (single, sharded):
        (path / "consolidated.safetensors").write_bytes(b"no safetensors, and never read")
        (path / "expected.safetensors").write_bytes(b"")
        with Checkpoint(path) as checkpoint:
            assert checkpoint.left_out == ["consolidated.safetensors", "expected.safetensors"]
    with Checkpoint(golden("qwen3moe-w4a16-asym-g128")) as checkpoint:
        assert checkpoint.left_out == ["expected.safetensors", "golden-marlin.safetensors"]


def rewrite(text: str) -> Callable[[Path], object]:
    return lambda path: (path / "config.json").write_text(text)


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (lambda p: (p / "config.json").unlink(), r"config\.json: .*got No such file"),
        (rewrite(""), r"config\.json: expected JSON, got text that is none"),
        (rewrite('{"a": '), r"config\.json: expected JSON"),
        (rewrite("[1]"), r"config\.json: expected a JSON object, got list"),
        (rewrite("{}"), r"config\.json: expected a quantization_config .*got none.*not quantized"),
        (rewrite('{"quantization_config": 4}'), "expected quantization_config to be an object, got int"),
        (lambda p: (p / "config.json").write_bytes(b"\xff\xfe{"), r"config\.json: expected JSON"),
        (
            lambda p: (p / "model.safetensors").unlink(),
            "exactly one safetensors file, got no safetensors file",
        ),
        (shutil.rmtree, "expected a checkpoint directory .*got nothing there"),
    ],
)
def test_single_file_directories_that_are_refused(
    single: Path, damage: Callable[[Path], object], text: str
) -> None:
    damage(single)
    with pytest.raises(CheckpointError, match=text):
        load_layers(single)


def test_a_file_is_no_directory(single: Path) -> None:
    with pytest.raises(CheckpointError, match=r"expected a checkpoint directory .*got a file"):
        load_layers(single / "config.json")


def index_of(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], object]:
    return lambda path: edit_json(path / INDEX, change)


def renamed_file(name: str) -> Callable[[Path], object]:
    """The index says that lm_head lies in file `name`."""
    return index_of(lambda index: index["weight_map"].update({"lm_head.weight": name}))


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (
            index_of(lambda i: i["weight_map"].update({"no.such": i["weight_map"]["lm_head.weight"]})),
            r"names 1 tensors that their files do not hold: no\.such \(said to be in model-0000\d-of-00003",
        ),
        (
            index_of(lambda i: i["weight_map"].pop("lm_head.weight")),
            r"the files hold 1 tensors that it does not name: lm_head\.weight \(in model-0000",
        ),
        (renamed_file("gone.safetensors"), r"gone\.safetensors: .*got No such file"),
        (renamed_file("../single/model.safetensors"), r"inside the directory, got '\.\./single/model"),
        (renamed_file("a/../../model.safetensors"), "inside the directory"),
        (renamed_file("/etc/passwd"), "inside the directory, got '/etc/passwd' in its index"),
        (renamed_file(""), "inside the directory, got ''"),
        (renamed_file("..\\model.safetensors"), "inside the directory"),
        (renamed_file("nul\0.safetensors"), r"inside the directory, got .nul\\x00\.safetensors"),
        (renamed_file("\ud800.safetensors"), "surrogates not allowed"),
        (renamed_file("x" * 300 + ".safetensors"), "File name too long"),
        (renamed_file("config.json"), r"config\.json: expected a complete safetensors file"),
        (renamed_file("."), "inside the directory"),
        (index_of(lambda i: i.update(weight_map={})), "got an empty one"),
        (index_of(lambda i: i.update(weight_map=[])), "weight_map of tensor names to file names, got list"),
        (index_of(lambda i: i.pop("weight_map")), "weight_map of tensor names to file names, got NoneType"),
        (index_of(lambda i: i["weight_map"].update({"lm_head.weight": 3})), "expected a weight_map"),
        (lambda p: (p / INDEX).write_text("oops"), "index.json: expected JSON"),
        (lambda p: (p / INDEX).unlink(), "expected model.safetensors.index.json, .*got model-00001-of-00003"),
        (
            lambda p: shutil.copy(
                p / "model-00001-of-00003.safetensors", p / "model-00007-of-00009.safetensors"
            ),
            "expected every model shard to be named by .*got model-00007-of-00009.safetensors beside it",
        ),
        (lambda p: (p / "model-00002-of-00003.safetensors").unlink(), "model-00002-of-00003.*No such file"),
        (lambda p: truncate(p / "model-00002-of-00003.safetensors", 1), "model-00002.*cut short"),
        (lambda p: (p / "model-00003-of-00003.safetensors").write_bytes(b""), "model-00003.*zero bytes"),
        (lambda p: drop_tensor(p, "lm_head.weight", index=False), r"do not hold: lm_head\.weight"),
        (
            lambda p: rename_tensor(p, "lm_head.weight", "lm_head.weights", index=False),
            "does not name: lm_head",
        ),
    ],
)
def test_sharded_directories_that_are_refused(
    sharded: Path, single: Path, damage: Callable[[Path], object], text: str
) -> None:
    damage(sharded)
    with pytest.raises(CheckpointError, match=f"(?s){text}"):
        load_layers(sharded)


def test_one_shard_of_several_without_an_index(sharded: Path) -> None:
    (sharded / INDEX).unlink()
    for number in (2, 3):
        (sharded / f"model-0000{number}-of-00003.safetensors").unlink()
    with pytest.raises(
        CheckpointError, match=r"index\.json, because model-00001-of-00003\.safetensors is one"
    ):
        load_layers(sharded)


def test_the_only_shard_of_one_needs_no_index(single: Path) -> None:
    (single / "model.safetensors").rename(single / "model-00001-of-00001.safetensors")
    assert len(load_layers(single)) == 1


def test_shards_beside_a_single_file(single: Path) -> None:
    shutil.copy(single / "model.safetensors", single / "model-00001-of-00002.safetensors")
    with pytest.raises(CheckpointError, match=r"named by model\.safetensors, got model-00001-of-00002"):
        load_layers(single)


def test_a_tensor_in_two_files(sharded: Path) -> None:
    file = file_of(sharded, "lm_head.weight").name
    other = next(p for p in sorted(sharded.glob("model-*")) if p.name != file)
    from safetensors.torch import load_file

    save_file(load_file(other) | {"lm_head.weight": torch.zeros(2)}, other)
    with pytest.raises(
        CheckpointError, match=r"lm_head\.weight: expected in one file, got it in model-.* and"
    ):
        Checkpoint(sharded)


def test_all_problems_of_a_directory_in_one_text(sharded: Path) -> None:
    (sharded / "model-00001-of-00003.safetensors").unlink()
    (sharded / "model-00002-of-00003.safetensors").write_bytes(b"")
    truncate(sharded / "model-00003-of-00003.safetensors", 64)
    with pytest.raises(CheckpointError) as caught:
        Checkpoint(sharded)
    headline, *lines = str(caught.value).splitlines()
    assert headline == f"{sharded}: 3 problems."
    found = sorted(line.removeprefix(f"{sharded}/").split(":")[0] for line in lines)
    assert found == [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"num_experts_per_tok": 4}, 4),
        ({"moe_topk": 3, "text_config": {"moe_k": 5}}, 5),
        ({"num_experts_per_tok": "two"}, None),
        ({"num_experts_per_tok": 0}, None),
        ({}, None),
    ],
)
def test_top_k(single: Path, config: dict[str, Any], expected: int | None) -> None:
    (single / "config.json").write_text(json.dumps(config))
    with Checkpoint(single) as checkpoint:
        assert checkpoint.top_k == expected


@pytest.mark.parametrize("entry", ["../../x", "/etc/passwd", "", "nul\0.safetensors"])
def test_a_wrong_entry_is_named_before_the_shards_it_leaves_stray(sharded: Path, entry: str) -> None:
    edit_json(
        sharded / INDEX, lambda index: index["weight_map"].update(dict.fromkeys(index["weight_map"], entry))
    )
    with pytest.raises(CheckpointError, match="inside the directory, got ") as caught:
        Checkpoint(sharded)
    assert ascii(entry) in str(caught.value)


def test_a_config_that_is_a_pipe(single: Path) -> None:
    (single / "config.json").unlink()
    os.mkfifo(single / "config.json")
    with pytest.raises(CheckpointError, match=r"config\.json: expected a JSON file, got a named pipe"):
        load_layers(single)
