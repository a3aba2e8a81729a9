"""What lies in a packed directory: names, tensors, configs, index."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from safetensors import safe_open

from marlin_moe import MarlinMoEWarning, load_layers, repack_checkpoint
from marlin_moe.repack.errors import CheckpointError, PackedError
from marlin_moe.repack.packed.names import layer_files, packed_config
from packed_files import MANIFEST, contents


def all_tensors(path: Path) -> dict[str, torch.Tensor]:
    tensors = {}
    for name in sorted(
        set(json.loads((path / "model.safetensors.index.json").read_text())["weight_map"].values())
    ):
        with safe_open(path / name, "pt") as file:
            for key in file.keys():  # noqa: SIM118 (not a dict)
                tensors[key] = file.get_tensor(key)
    return tensors


def test_the_files_and_tensors_of_the_format(pair_of: Callable[[str], Any]) -> None:
    pair = pair_of("act-order")
    experts = "model.layers.0.mlp.experts"
    layer = load_layers(pair.source)[experts]
    found = all_tensors(pair.packed)
    mine = {name: tensor for name, tensor in found.items() if name.startswith(experts)}
    assert set(mine) == {f"{experts}.{name}" for name, _ in layer.tensors()}
    for name, tensor in layer.tensors():
        assert torch.equal(mine[f"{experts}.{name}"], tensor), name
    assert set(contents(pair.packed)) == {
        "experts-0.safetensors",
        "rest-00001.safetensors",
        "model.safetensors.index.json",
        "config.json",
        "source_config.json",
        "source_files.json",
        "generation_config.json",
        MANIFEST,
    }
    index = json.loads((pair.packed / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(found)
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in found.values())


def test_everything_else_is_carried_unchanged(pair: Any) -> None:
    config = json.loads((pair.packed / "config.json").read_text())
    source = json.loads((pair.source / "config.json").read_text())
    holders = [c for c in (config, config.get("text_config", {})) if "quantization_config" in c]
    assert [h["quantization_config"] for h in holders] == [{"quant_method": "marlin_moe", "version": 1}]
    for c in (config, source):
        c.pop("quantization_config", None)
        c.get("text_config", {}).pop("quantization_config", None)
    assert config == source
    assert (pair.packed / "source_config.json").read_bytes() == (pair.source / "config.json").read_bytes()


def test_the_manifest_hashes_what_lies_there(pair_of: Callable[[str], Any]) -> None:
    packed = pair_of("bits of w2 differ").packed
    manifest = json.loads((packed / MANIFEST).read_text())
    tensors = all_tensors(packed)
    said = {t["name"]: t["xxh3_128"] for file in manifest["tensor_files"] for t in file["tensors"]}
    assert said == {
        name: xxhash.xxh3_128_hexdigest(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
        for name, tensor in tensors.items()
    }
    for file in manifest["plain_files"]:
        assert file["xxh3_128"] == xxhash.xxh3_128_hexdigest((packed / file["name"]).read_bytes())
    layer = manifest["layers"][0]
    assert layer["module"] == "language_model.model.layers.0.block_sparse_moe.experts"
    assert (layer["w13"]["bits"], layer["w2"]["bits"], layer["w2"]["group_size"]) == (4, 8, 64)
    assert layer["scheme"]["w2"]["where"].startswith("quantization_config.config_groups.")


def test_the_same_source_gives_the_same_bytes(pair_of: Callable[[str], Any], tmp_path: Path) -> None:
    pair = pair_of("plain")
    repack_checkpoint(pair.source, tmp_path / "again", block_bytes=1)
    assert contents(tmp_path / "again") == contents(pair.packed)


def test_the_report(pair_of: Callable[[str], Any], tmp_path: Path) -> None:
    pair = pair_of("plain")
    report = repack_checkpoint(pair.source, tmp_path / "again")
    written = contents(tmp_path / "again")
    assert report.packed_bytes == sum(map(len, written.values()))
    assert report.files == len(written)
    assert (report.layers, report.resumed_files, report.warnings) == (2, 0, ())
    assert report.carried_files == ("generation_config.json",)
    with safe_open(tmp_path / "again" / "rest-00001.safetensors", "pt") as file:
        assert report.carried_tensors == len(file.keys())
    assert report.native_path
    assert json.dumps(report.as_dict())


def test_files_of_other_formats_are_named_and_not_copied(
    own_pair: Callable[[str], Any], tmp_path: Path
) -> None:
    source = own_pair("plain").source
    for name in ("pytorch_model.bin", "consolidated.pth", "spare.safetensors"):
        (source / name).write_bytes(b"x")
    with pytest.warns(MarlinMoEWarning, match=r"not copied.*consolidated\.pth, pytorch_model\.bin, spare"):
        report = repack_checkpoint(source, tmp_path / "new")
    assert report.left_out == ("consolidated.pth", "pytorch_model.bin", "spare.safetensors")
    assert not set(report.left_out) & set(contents(tmp_path / "new"))


def test_a_companion_that_links_out_is_refused_unless_asked_for(
    own_pair: Callable[[str], Any], tmp_path: Path
) -> None:
    source = own_pair("plain").source
    (tmp_path / "secret.txt").write_text("key")
    (source / "notes.txt").symlink_to(tmp_path / "secret.txt")
    with pytest.raises(CheckpointError, match=r"notes\.txt: expected a file inside"):
        repack_checkpoint(source, tmp_path / "new")
    assert not (tmp_path / "new").exists()
    repack_checkpoint(source, tmp_path / "new", follow_links=True)
    assert (tmp_path / "new" / "notes.txt").read_text() == "key"


@pytest.mark.parametrize(
    ("modules", "labels"),
    [
        (["model.layers.3.mlp.experts", "model.layers.11.mlp.experts"], ["3", "11"]),
        (["a.0.experts", "b.0.experts"], ["0", "1"]),
        (["experts"], ["0"]),
        (["model.layers.5.mlp.experts"], ["5"]),
        (["vision.2.layers.1.experts", "text.2.layers.7.experts"], ["1", "7"]),
    ],
)
def test_a_layers_file_has_its_number_where_that_is_unique(modules: list[str], labels: list[str]) -> None:
    assert list(layer_files(modules).values()) == [f"experts-{label}.safetensors" for label in labels]


def test_the_config_keeps_its_order_and_an_old_key_is_renamed() -> None:
    config = {"a": 1, "compression_config": {"quant_method": "compressed-tensors"}, "z": "ü"}
    packed = packed_config(json.dumps(config).encode())
    assert list(json.loads(packed)) == ["a", "quantization_config", "z"]
    assert "ü".encode() in packed


def test_a_pipe_is_named_and_not_copied(own_pair: Callable[[str], Any], tmp_path: Path) -> None:
    source = own_pair("plain").source
    os.mkfifo(source / "pipe.txt")
    with pytest.warns(MarlinMoEWarning, match=r"not copied.*no regular files: pipe\.txt"):
        report = repack_checkpoint(source, tmp_path / "new")
    assert report.left_out == ("pipe.txt",)
    assert not (tmp_path / "new" / "pipe.txt").exists()


def test_companions_that_cannot_be_copied_or_named(own_pair: Callable[[str], Any], tmp_path: Path) -> None:
    source = own_pair("plain").source
    (source / "gone.txt").symlink_to("nowhere.txt")
    with pytest.raises(PackedError, match=r"gone\.txt: expected a file to copy, got a link to nowhere\.txt"):
        repack_checkpoint(source, tmp_path / "new")
    (source / "gone.txt").unlink()
    Path(os.fsdecode(os.fsencode(source) + b"/caf\xe9.txt")).write_text("x")
    with pytest.raises(PackedError, match=r"expected file names in UTF-8.*caf\\udce9\.txt"):
        repack_checkpoint(source, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_half_a_surrogate_pair_in_the_config() -> None:
    config = b'{"note": "\\ud800", "quantization_config": {}}'
    assert json.loads(packed_config(config))["note"] == "\ud800"
