"""A command that runs again after it has finished: the same source says so, another one is refused."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoints import CheckpointSpec, make_source, write_source
from marlin_moe import repack_checkpoint, unpack_checkpoint
from marlin_moe.repack.errors import ExpertsError, PackedError
from mutations import flip_bit, flip_tensor_bit
from packed_files import MANIFEST, contents

WORK = ".marlin_moe"


def stamps(path: Path) -> dict[str, tuple[int, int]]:
    return {file.name: (file.stat().st_ino, file.stat().st_mtime_ns) for file in path.iterdir()}


def test_the_same_command_again_has_nothing_to_do(own_pair: Callable[[str], Any]) -> None:
    pair = own_pair("plain")
    before = stamps(pair.packed)
    report = repack_checkpoint(pair.source, pair.packed)
    assert report.already_complete
    assert report.resumed_files == report.files == len(before)
    assert stamps(pair.packed) == before


def test_a_first_run_is_not_already_complete(pair_of: Callable[[str], Any], tmp_path: Path) -> None:
    assert not repack_checkpoint(pair_of("plain").source, tmp_path / "packed").already_complete


def test_a_read_only_directory_is_looked_at_too(own_pair: Callable[[str], Any]) -> None:
    pair = own_pair("plain")
    pair.packed.chmod(0o500)
    try:
        assert repack_checkpoint(pair.source, pair.packed).already_complete
    finally:
        pair.packed.chmod(0o700)


def age(path: Path, seconds: float) -> None:
    for file in (*path.rglob("*"), path):
        os.utime(file, (time.time() - seconds, time.time() - seconds))


@pytest.mark.parametrize("again", [lambda path: path.touch(), lambda path: path.chmod(0o600)])
def test_a_younger_source_of_the_same_bytes(
    own_pair: Callable[[str], Any], again: Callable[[Path], object]
) -> None:
    pair = own_pair("act-order")
    time.sleep(0.02)
    for path in pair.source.iterdir():
        again(path)
    assert repack_checkpoint(pair.source, pair.packed).already_complete


@pytest.mark.parametrize("keep_mtime", [False, True])
@pytest.mark.parametrize(
    ("change", "found"),
    [
        (
            lambda s: flip_tensor_bit(s, "model.layers.1.mlp.experts.0.up_proj.weight_packed"),
            r"layers\.1\.mlp\.experts\.0\.up_proj\.weight_packed",
        ),
        (lambda s: flip_tensor_bit(s, "model.layers.1.self_attn.q_proj.weight"), r"q_proj\.weight"),
        (
            lambda s: (s / "generation_config.json").write_text("{ }"),
            r"generation_config\.json: expected the",
        ),
        (lambda s: (s / "more.txt").write_text("more"), r"more\.txt: expected in both"),
        (lambda s: (s / "config.json").write_text((s / "config.json").read_text() + "\n"), r"config\.json"),
    ],
)
def test_a_changed_source_is_refused(
    own_pair: Callable[[str], Any], change: Callable[[Path], object], found: str, keep_mtime: bool
) -> None:
    pair = own_pair("plain")
    age(pair.source, 1000)
    age(pair.packed, 500)
    times = {path: path.stat() for path in pair.source.iterdir()}
    change(pair.source)
    if keep_mtime:
        for path, at in times.items():
            os.utime(path, ns=(at.st_atime_ns, at.st_mtime_ns))
    before = stamps(pair.packed)
    with pytest.raises(PackedError, match=rf"finished packed checkpoint that differs from it: .*{found}"):
        repack_checkpoint(pair.source, pair.packed)
    assert stamps(pair.packed) == before


def test_another_checkpoint_of_the_same_model_is_refused_whatever_its_age(
    own_pair: Callable[[str], Any],
) -> None:
    """A later training step has the same names, shapes and config, and may lie there for longer."""
    pair = own_pair("plain")
    other = pair.source.with_name("other")
    shutil.copytree(pair.source, other)
    flip_tensor_bit(other, "model.layers.1.mlp.experts.0.up_proj.weight_packed")
    for path in (other, pair.source):
        age(path, 1000)
    with pytest.raises(PackedError, match="differs from it"):
        repack_checkpoint(other, pair.packed)
    back = pair.source.with_name("back")
    unpack_checkpoint(pair.packed, back)
    shutil.rmtree(back)
    shutil.copytree(other, back)
    (back / "config.json").touch()  # as the last file of an unpacking is
    with pytest.raises(PackedError, match="differs from it"):
        unpack_checkpoint(pair.packed, back)


@pytest.mark.parametrize("name", ["experts-0.safetensors", "config.json", MANIFEST])
def test_a_damaged_checkpoint_is_not_complete(own_pair: Callable[[str], Any], name: str) -> None:
    pair = own_pair("plain")
    flip_bit(pair.packed / name, 9)
    with pytest.raises(PackedError, match=name.replace(".", r"\.")):
        repack_checkpoint(pair.source, pair.packed)
    (pair.packed / "experts-0.safetensors").unlink()
    with pytest.raises(PackedError):
        repack_checkpoint(pair.source, pair.packed)


def test_dead_experts_stay_refused_unless_accepted(tmp_path: Path) -> None:
    source = make_source(CheckpointSpec())
    for name in [name for name in source.tensors if name.endswith("1.up_proj.weight_scale")]:
        source.tensors[name] = torch.zeros_like(source.tensors[name])
    write_source(tmp_path / "source", source)
    repack_checkpoint(tmp_path / "source", tmp_path / "packed", allow_dead_experts=True)
    with pytest.raises(ExpertsError, match="allow_dead_experts"):
        repack_checkpoint(tmp_path / "source", tmp_path / "packed")
    again = repack_checkpoint(tmp_path / "source", tmp_path / "packed", allow_dead_experts=True)
    assert again.already_complete


def test_a_finished_run_whose_folder_stayed(own_pair: Callable[[str], Any]) -> None:
    pair = own_pair("plain")
    before = contents(pair.packed)
    (pair.packed / WORK).mkdir()
    (pair.packed / WORK / "experts-0.safetensors.finished.json").write_text("{}")
    assert repack_checkpoint(pair.source, pair.packed).already_complete
    assert contents(pair.packed) == before
