"""What an earlier run finished is looked at before it is kept: by its own bytes, and by the source's."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from marlin_moe import repack_checkpoint, unpack_checkpoint, verify_checkpoint
from marlin_moe.repack.errors import PackedError
from mutations import flip_bit, flip_tensor_bit
from packed_files import MANIFEST, StopAt, contents

WORK = ".marlin_moe"
UP = "model.layers.{}.mlp.experts.0.up_proj.weight_packed"


def interrupted(source: Path, packed: Path, at: str = "config.json") -> dict[str, int]:
    """Files that a run finished before it was stopped -> their inodes."""
    with pytest.raises(RuntimeError, match="stopped"):
        repack_checkpoint(source, packed, workers=1, progress=StopAt(at))
    time.sleep(0.02)  # the clock of inodes ticks every few milliseconds
    return inodes(packed)


def inodes(packed: Path) -> dict[str, int]:
    return {path.name: path.stat().st_ino for path in packed.iterdir() if path.name != WORK}


def made_again(before: dict[str, int], packed: Path) -> set[str]:
    now = inodes(packed)
    return {name for name, inode in before.items() if now.get(name) != inode}


def copied(path: Path) -> None:
    """Another file with the same bytes and mtime, as a backup gives it back."""
    shutil.copy2(path, path.with_name("copy"))
    path.with_name("copy").rename(path)


def fetched(path: Path) -> None:
    """Another file with the same bytes, as the hub's client downloads it."""
    shutil.copyfile(path, path.with_name("copy"))
    path.with_name("copy").rename(path)


@pytest.mark.parametrize("name", ["plain", "act-order, padded", "padded"])
@pytest.mark.parametrize("again", [copied, fetched, Path.touch, lambda path: path.chmod(0o600)])
def test_a_source_that_is_there_again_with_the_same_bytes_is_resumed(
    own_pair: Callable[[str], Any], tmp_path: Path, name: str, again: Callable[[Path], object]
) -> None:
    pair, packed = own_pair(name), tmp_path / "new"
    before = interrupted(pair.source, packed)
    assert {"rest-00001.safetensors", "generation_config.json"} < before.keys()
    assert any(name.startswith("experts-") for name in before)
    for path in pair.source.iterdir():
        again(path)
    report = repack_checkpoint(pair.source, packed)
    assert made_again(before, packed) == set()
    assert report.resumed_files == len(before)
    assert contents(packed) == contents(pair.packed)


def test_the_bytes_are_looked_at_once(
    own_pair: Callable[[str], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from marlin_moe.repack.packed.resume import _Earlier

    pair, packed = own_pair("plain"), tmp_path / "new"
    before = interrupted(pair.source, packed)
    for path in pair.source.iterdir():
        path.touch()
    looked = []
    look = _Earlier.is_of_this_source
    monkeypatch.setattr(
        _Earlier, "is_of_this_source", lambda self: looked.append(self.file.name) or look(self)
    )
    for _ in range(2):
        with pytest.raises(RuntimeError, match="stopped"):
            repack_checkpoint(pair.source, packed, workers=1, progress=StopAt("config.json"))
    own = {"source_config.json", "source_files.json", "model.safetensors.index.json"}
    assert sorted(looked) == sorted(before.keys() - own)


def keep_mtime(change: Callable[[Path], object]) -> Callable[[Path], None]:
    def changed(source: Path) -> None:
        times = {path: path.stat() for path in source.iterdir()}
        change(source)
        for path, found in times.items():
            if path.exists():
                os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))

    return changed


@pytest.mark.parametrize("keep", [keep_mtime, lambda change: change], ids=["mtime kept", "mtime new"])
@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda s: flip_tensor_bit(s, UP.format(0)), {"experts-0.safetensors"}),
        (lambda s: flip_tensor_bit(s, UP.format(1)), {"experts-1.safetensors"}),
        (lambda s: flip_tensor_bit(s, "model.layers.1.self_attn.q_proj.weight"), {"rest-00001.safetensors"}),
        (lambda s: flip_bit(s / "generation_config.json", 2), {"generation_config.json"}),
        (lambda s: (s / "generation_config.json").write_text("{}"), {"generation_config.json"}),
        (lambda s: (s / "generation_config.json").unlink(), {"generation_config.json"}),
        (lambda s: (s / "more.txt").write_text("more"), set()),
    ],
)
def test_what_was_made_of_a_file_that_changed_is_made_again(
    own_pair: Callable[[str], Any],
    tmp_path: Path,
    change: Callable[[Path], object],
    expected: set[str],
    keep: Callable[..., Callable[[Path], None]],
) -> None:
    source, packed = own_pair("plain").source, tmp_path / "new"
    before = interrupted(source, packed)
    keep(change)(source)
    repack_checkpoint(source, packed)
    assert made_again(before, packed) == expected
    repack_checkpoint(source, tmp_path / "fresh")
    assert contents(packed) == contents(tmp_path / "fresh")


def test_a_source_with_another_header_is_refused(own_pair: Callable[[str], Any], tmp_path: Path) -> None:
    source, packed = own_pair("plain").source, tmp_path / "new"
    interrupted(source, packed)
    before = contents(packed)
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"more": 1}))
    with pytest.raises(PackedError, match="differs in source: the source is another one or was changed"):
        repack_checkpoint(source, packed)
    assert {n: d for n, d in contents(packed).items() if n != f"{WORK}/lock"} == {
        n: d for n, d in before.items() if n != f"{WORK}/lock"
    }


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("byte", [0, 7, 9, 4000, -1])
def test_a_finished_file_that_was_damaged_is_made_again(
    pair_of: Callable[[str], Any], tmp_path: Path, byte: int, workers: int
) -> None:
    pair, packed = pair_of("plain"), tmp_path / "new"
    before = interrupted(pair.source, packed)
    for name in before:
        size = (packed / name).stat().st_size
        flip_bit(packed / name, byte % size)
    report = repack_checkpoint(pair.source, packed, workers=workers)
    assert report.resumed_files == 0
    assert contents(packed) == contents(pair.packed)


@pytest.mark.parametrize("what", ["gone", "empty", "longer", "a link", "a pipe"])
def test_a_finished_file_that_is_no_longer_one_is_made_again(
    pair_of: Callable[[str], Any], tmp_path: Path, what: str
) -> None:
    pair, packed = pair_of("plain"), tmp_path / "new"
    before = interrupted(pair.source, packed)
    for name in before:
        place = packed / name
        content = place.read_bytes()
        place.unlink()
        if what == "empty":
            place.touch()
        elif what == "longer":
            place.write_bytes(content + b" ")
        elif what == "a link":
            (tmp_path / name).write_bytes(content)
            place.symlink_to(tmp_path / name)
        elif what == "a pipe":
            os.mkfifo(place)
    repack_checkpoint(pair.source, packed)
    assert contents(packed) == contents(pair.packed)
    assert not [path for path in packed.iterdir() if path.is_symlink()]


RECORDS = [
    b"",
    b"[]",
    b"null",
    b'{"file": 3}',
    b'{"file": [1]}',
    b'{"file": {}}',
    b'{"file": {"name": "experts-0.safetensors"}}',
    b'{"file": {"name": "experts-0.safetensors", "size_bytes": "4", "xxh3_128": 1}}',
    b'{"file": {"name": 1, "size_bytes": -1, "header_xxh3_128": null, "tensors": {}}}',
    b'{"file": {"name": "x", "size_bytes": 1, "header_xxh3_128": "", "tensors": [3]}}',
    b"[" * 100_000,
    b"\xff\xfe",
]


@pytest.mark.parametrize("record", RECORDS, ids=range(len(RECORDS)))
def test_a_torn_record_is_no_record(pair_of: Callable[[str], Any], tmp_path: Path, record: bytes) -> None:
    pair, packed = pair_of("plain"), tmp_path / "new"
    before = interrupted(pair.source, packed)
    for name in before:
        (packed / WORK / f"{name}.finished.json").write_bytes(record)
    assert repack_checkpoint(pair.source, packed).resumed_files == 0
    assert contents(packed) == contents(pair.packed)


@pytest.mark.parametrize(
    ("key", "value"),
    [("dead_projections", None), ("dead_projections", [1]), ("dead_projections", "no"), ("stamps", 7)],
)
def test_a_record_with_a_value_of_another_type(
    pair_of: Callable[[str], Any], tmp_path: Path, key: str, value: object
) -> None:
    pair, packed = pair_of("plain"), tmp_path / "new"
    before = interrupted(pair.source, packed)
    place = packed / WORK / "experts-0.safetensors.finished.json"
    place.write_text(json.dumps(json.loads(place.read_text()) | {key: value}))
    kept = repack_checkpoint(pair.source, packed).resumed_files
    assert kept == len(before) - (key == "dead_projections")
    assert contents(packed) == contents(pair.packed)


def test_no_manifest_beside_files_that_are_made_again(pair_of: Callable[[str], Any], tmp_path: Path) -> None:
    """A run killed between its manifest and its end, a file damaged since, and a run that does not finish."""
    pair, packed = pair_of("plain"), tmp_path / "new"
    interrupted(pair.source, packed)
    shutil.copy(pair.packed / MANIFEST, packed / MANIFEST)
    flip_bit(packed / "experts-0.safetensors", -1)
    with pytest.raises(RuntimeError, match="stopped"):
        repack_checkpoint(pair.source, packed, workers=1, progress=StopAt("config.json"))
    assert not (packed / MANIFEST).exists()
    repack_checkpoint(pair.source, packed)
    assert contents(packed) == contents(pair.packed)


def test_unpacking_looks_at_what_is_finished_too(pair_of: Callable[[str], Any], tmp_path: Path) -> None:
    pair, again = pair_of("plain"), tmp_path / "again"
    with pytest.raises(RuntimeError, match="stopped"):
        unpack_checkpoint(pair.packed, again, progress=StopAt("model-00001-of-00003.safetensors"))
    done = sorted(path.name for path in again.glob("*.safetensors"))
    assert len(done) == 2
    flip_bit(again / done[0], -1)
    assert unpack_checkpoint(pair.packed, again).resumed_files == 1
    assert contents(again) == contents(pair.source)
    assert verify_checkpoint(pair.packed, again).ok
