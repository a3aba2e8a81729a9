"""Names of models on the hub: a local cache laid out as huggingface_hub lays it out, and no network."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import huggingface_hub.constants
import pytest
from click.testing import CliRunner

from checkpoints import CheckpointSpec, write_checkpoint
from marlin_moe import inspect_checkpoint, load_layers, repack_checkpoint, verify_checkpoint
from marlin_moe.cli.main import main
from marlin_moe.repack.errors import CheckpointError
from marlin_moe.repack.model_path import model_path
from packed_files import contents

SPEC = CheckpointSpec(num_experts=2, hidden_size=64, intermediate_size=64, shards=2, top_k=1)
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def cached_model(hub: Path, files: Path, name: str, commit: str = COMMIT, ref: str = "main") -> Path:
    """A snapshot in the hub's cache: `snapshots/<commit>/<file>` links to `blobs/<hash>`; `refs/<ref>`."""
    repository = hub / f"models--{name.replace('/', '--')}"
    snapshot = repository / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir(exist_ok=True)
    for number, file in enumerate(sorted(files.iterdir())):
        blob = repository / "blobs" / f"{commit[0]}{number:063x}"
        shutil.copy(file, blob)
        (snapshot / file.name).symlink_to(os.path.relpath(blob, snapshot))
    (repository / "refs").mkdir(exist_ok=True)
    (repository / "refs" / ref).write_text(commit)
    return snapshot


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of a hub that cannot be reached; the current directory holds nothing."""
    cache, empty = tmp_path / "hub", tmp_path / "empty"
    cache.mkdir()
    empty.mkdir()
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(empty)
    return cache


def test_a_model_in_the_local_cache_is_read_as_it_lies_there(hub: Path, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "plain", SPEC)
    snapshot = cached_model(hub, tmp_path / "plain", "org/Some-Model.A4B")
    before = contents(hub)
    assert model_path("org/Some-Model.A4B") == snapshot
    assert load_layers("org/Some-Model.A4B").keys() == load_layers(tmp_path / "plain").keys()
    assert inspect_checkpoint("org/Some-Model.A4B").layers
    repack_checkpoint("org/Some-Model.A4B", tmp_path / "packed")
    repack_checkpoint(tmp_path / "plain", tmp_path / "expected")
    assert contents(tmp_path / "packed") == contents(tmp_path / "expected")
    assert verify_checkpoint(tmp_path / "packed", "org/Some-Model.A4B").ok
    assert contents(hub) == before


def test_a_packed_checkpoint_on_the_hub(hub: Path, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "plain", SPEC)
    repack_checkpoint(tmp_path / "plain", tmp_path / "packed")
    cached_model(hub, tmp_path / "packed", "org/packed")
    (layer,) = load_layers("org/packed").values()
    (expected,) = load_layers(tmp_path / "plain").values()
    assert layer.w13.qweight.equal(expected.w13.qweight)
    result = CliRunner().invoke(main, ["verify", "org/packed"])
    assert result.exit_code == 0, result.output


def test_revisions(hub: Path, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "one", SPEC)
    write_checkpoint(tmp_path / "two", SPEC, seed=7)
    first = cached_model(hub, tmp_path / "one", "org/model")
    second = cached_model(hub, tmp_path / "two", "org/model", commit=COMMIT[::-1], ref="v2")
    assert model_path("org/model") == first
    assert model_path("org/model@v2") == model_path(f"org/model@{COMMIT[::-1]}") == second


def test_a_directory_of_that_name_comes_first(hub: Path, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "plain", SPEC)
    cached_model(hub, tmp_path / "plain", "org/model")
    write_checkpoint(Path("org/model"), SPEC)
    assert model_path("org/model") == Path("org/model")


@pytest.mark.parametrize(
    "name", ["/org/model", "./org/model", "a/b/c", "model", "../model", "org/", "a/config.json"]
)
def test_what_can_only_be_a_path(hub: Path, name: str) -> None:
    assert model_path(name) == Path(name)


@pytest.mark.parametrize("name", ["org/model", "org/model@v2"])
def test_a_model_that_is_not_there_says_how_to_get_it(hub: Path, name: str) -> None:
    command = f"hf download {name.replace('@', ' --revision ')}"
    with pytest.raises(
        CheckpointError, match=rf"{name}: expected a directory or a model .*run {command} \(and"
    ):
        load_layers(name)
    result = CliRunner().invoke(main, ["repack", name, "out"])
    assert result.exit_code == 1
    assert command in result.stderr
    assert not Path("out").exists()


def test_a_mistyped_path_does_not_go_to_the_network(
    hub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import socket

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    asked: list[object] = []

    def connect(*_: object, **__: object) -> None:
        asked.append(1)
        raise OSError("no network")

    monkeypatch.setattr(socket, "getaddrinfo", connect)
    Path("models").mkdir()
    Path("models/Qwen3").mkdir()
    expected = r"models/Qwen: expected a directory, because the folder models is here, got none .*\(Qwen3\)"
    with pytest.raises(CheckpointError, match=expected):
        model_path("models/Qwen")
    assert not asked
    write_checkpoint(tmp_path / "plain", SPEC)
    snapshot = cached_model(hub, tmp_path / "plain", "models/Cached")
    assert model_path("models/Cached") == snapshot
    assert not asked
    with pytest.raises(CheckpointError, match=r"org/model: expected a directory or a model"):
        model_path("org/model")
    assert asked


def test_without_huggingface_hub(hub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(
        CheckpointError, match=r"cannot be imported.*pip install 'marlin-moe\[hub\]', then hf dow"
    ):
        load_layers("org/model")
