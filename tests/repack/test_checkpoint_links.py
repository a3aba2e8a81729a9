"""Links of a checkpoint directory: inside it, into a hub's blobs, and nowhere else."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from checkpoints import CheckpointSpec
from marlin_moe import load_layers
from marlin_moe.repack.checkpoint import Checkpoint
from marlin_moe.repack.errors import CheckpointError
from mutations import INDEX

SPEC = CheckpointSpec(num_experts=2, hidden_size=64, intermediate_size=64)


def linked(path: Path, target: Path, name: str = "model.safetensors") -> None:
    """Move file `name` of a directory to `target` and leave a link to it."""
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.move(path / name, target)
    (path / name).symlink_to(os.path.relpath(target, path))


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_links(tmp_path: Path, single: Path, name: str) -> None:
    linked(single, single / "data" / name, name)
    assert len(load_layers(single)) == 1
    (single / name).unlink()
    shutil.move(single / "data" / name, single / name)
    linked(single, tmp_path / "elsewhere" / name, name)
    with pytest.raises(CheckpointError, match=rf"{name}: expected a file inside .*got a link to .*elsewhere"):
        load_layers(single)
    with Checkpoint(single, follow_links=True) as checkpoint:
        assert "lm_head.weight" in checkpoint.tensors


def test_a_link_to_the_directory_itself(tmp_path: Path, single: Path) -> None:
    (tmp_path / "alias").symlink_to(single)
    assert len(load_layers(tmp_path / "alias")) == 1


def test_links_in_a_circle_and_to_nowhere(single: Path) -> None:
    (single / "model.safetensors").unlink()
    (single / "model.safetensors").symlink_to("other.safetensors")
    with pytest.raises(CheckpointError, match=r"model\.safetensors: .*got No such file"):
        load_layers(single)
    (single / "other.safetensors").symlink_to("model.safetensors")
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        load_layers(single)


def test_an_index_that_is_a_link_to_nowhere(sharded: Path) -> None:
    (sharded / INDEX).unlink()
    (sharded / INDEX).symlink_to("gone.json")
    shutil.copy(sharded / "model-00001-of-00003.safetensors", sharded / "model.safetensors")
    with pytest.raises(
        CheckpointError, match=r"index\.json: expected a readable JSON file, got No such file"
    ):
        load_layers(sharded)


def test_a_hub_snapshot_links_into_its_blobs_and_nowhere_else(tmp_path: Path, sharded: Path) -> None:
    repository = tmp_path / "hub" / "models--a--b"
    snapshot = repository / "snapshots" / "abc"
    snapshot.parent.mkdir(parents=True)
    shutil.move(sharded, snapshot)
    for number, file in enumerate(sorted(snapshot.iterdir())):
        linked(snapshot, repository / "blobs" / f"{number:064x}", file.name)
    assert len(load_layers(snapshot)) == 1
    other = repository.parent / "models--c--d" / "blobs" / "0"
    file = snapshot / "model-00001-of-00003.safetensors"
    other.parent.mkdir(parents=True)
    shutil.copy(file, other)
    file.unlink()
    file.symlink_to(other)
    with pytest.raises(
        CheckpointError, match=r"model-00001-of-00003\.safetensors: .*got a link to .*models--c"
    ):
        load_layers(snapshot)
