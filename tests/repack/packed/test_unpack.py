"""unpack writes the source again, byte for byte."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest

from marlin_moe import unpack_checkpoint
from marlin_moe.repack.errors import PackedError
from mutations import flip_tensor_bit
from packed_files import contents, flip_packed_bit


def test_every_file_of_the_source_comes_back(pair: Any, tmp_path: Path) -> None:
    report = unpack_checkpoint(pair.packed, tmp_path / "again", block_bytes=1)
    source, again = contents(pair.source), contents(tmp_path / "again")
    assert again.keys() == source.keys()
    assert [name for name in source if again[name] != source[name]] == []
    assert report.files == len(source)
    assert report.source_bytes == sum(len(v) for k, v in source.items() if k.endswith(".safetensors"))
    assert json.dumps(report.as_dict())


def test_folders_and_code_come_back(own_pair: Callable[[str], Any], tmp_path: Path) -> None:
    from marlin_moe import repack_checkpoint

    source = own_pair("plain").source
    (source / "encoding").mkdir()
    (source / "encoding" / "chat.jinja").write_text("{{ x }}")
    (source / "modeling_x.py").write_text("pass\n")
    (source / ".gitattributes").write_text("hidden")
    repack_checkpoint(source, tmp_path / "new")
    assert (tmp_path / "new" / "encoding" / "chat.jinja").read_text() == "{{ x }}"
    unpack_checkpoint(tmp_path / "new", tmp_path / "again")
    expected = {name: data for name, data in contents(source).items() if name != ".gitattributes"}
    assert contents(tmp_path / "again") == expected


def test_a_damaged_packed_checkpoint_gives_nothing(own_pair: Callable[[str], Any], tmp_path: Path) -> None:
    packed = own_pair("plain").packed
    flip_packed_bit(packed, "model.layers.1.mlp.experts.w13.qweight", byte=99)
    with pytest.raises(PackedError, match=r"experts-1\.safetensors: .*w13\.qweight: expected xxh3-128"):
        unpack_checkpoint(packed, tmp_path / "again")
    assert not (tmp_path / "again").exists()


def test_a_taken_destination_is_refused(pair_of: Callable[[str], Any], tmp_path: Path) -> None:
    packed = pair_of("plain").packed
    (tmp_path / "file").write_text("mine")
    for place, found in ((tmp_path, "got 1 files"), (tmp_path / "file", "got a file"), (packed, "outside")):
        with pytest.raises(PackedError, match=found):
            unpack_checkpoint(packed, place)
    assert contents(tmp_path) == {"file": b"mine"}


def test_a_stopped_unpacking_resumes(pair_of: Callable[[str], Any], tmp_path: Path) -> None:
    pair, again = pair_of("plain"), tmp_path / "again"

    class Stop:
        seen: ClassVar[set[str]] = set()

        def start(self, total_bytes: int) -> None:
            pass

        def advance(self, done_bytes: int, what: str) -> None:
            self.seen.add(what)
            if len([name for name in self.seen if name.startswith("model-")]) == 3:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        unpack_checkpoint(pair.packed, again, progress=Stop())
    done = list(again.glob("model-*.safetensors"))
    assert len(done) == 2
    assert not (again / "config.json").exists()
    inodes = [file.stat().st_ino for file in done]
    report = unpack_checkpoint(pair.packed, again)
    assert report.resumed_files == 2
    assert [file.stat().st_ino for file in done] == inodes
    assert contents(again) == contents(pair.source)


def test_unpacking_again_has_nothing_to_do(own_pair: Callable[[str], Any], tmp_path: Path) -> None:
    pair, again = own_pair("plain"), tmp_path / "again"
    assert not unpack_checkpoint(pair.packed, again).already_complete
    before = {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in again.iterdir()}
    report = unpack_checkpoint(pair.packed, again)
    assert report.already_complete
    assert report.resumed_files == report.files == len(before)
    for path in again.iterdir():
        path.chmod(0o600)  # younger now
    assert unpack_checkpoint(pair.packed, again).already_complete
    assert {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in again.iterdir()} == before


def test_what_is_not_the_unpacked_checkpoint_is_refused(
    own_pair: Callable[[str], Any], pair_of: Callable[[str], Any], tmp_path: Path
) -> None:
    pair, again = own_pair("plain"), tmp_path / "again"
    unpack_checkpoint(pair.packed, again)
    flip_tensor_bit(again, "model.layers.1.mlp.experts.0.up_proj.weight_packed")
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "config.json").write_text("{}")
    before = contents(tmp_path)
    for place, found in (
        (again, r"got a checkpoint that differs from it: .*experts\.0\.up_proj\.weight_packed"),
        (pair_of("padded").source, r"got a checkpoint that differs from it: .*expected the source that"),
        (pair_of("padded").packed, r"got a checkpoint that differs from it: .*experts-0"),
        (tmp_path / "project", r"got 1 files or folders \(config\.json\)"),
    ):
        with pytest.raises(PackedError, match=found):
            unpack_checkpoint(pair.packed, place)
    assert contents(tmp_path) == before
