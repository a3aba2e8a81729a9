"""The folder of a run: who may write, what is removed, and what a strange file in it does."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from marlin_moe import load_layers, repack_checkpoint, unpack_checkpoint, verify_checkpoint
from marlin_moe.repack.errors import MarlinMoEError, PackedError
from marlin_moe.repack.packed import durable
from marlin_moe.repack.packed.journal import Journal
from marlin_moe.repack.ranks import Ranks
from packed_files import MANIFEST, StopAt, contents

WORK = ".marlin_moe"


def entered(destination: Path, run: str = "this", **more: Any) -> Journal:
    journal = Journal(destination, {"run": run}, **more)
    journal.open()
    return journal


class SillyRename:
    """As NFS shows it: an open file that is removed stays, under another name, until it is closed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.kept: dict[tuple[int, int], Path] = {}
        unlink, close = os.unlink, os.close

        def kept_unlink(path: Any, *args: Any, **named: Any) -> None:
            found = os.lstat(path)
            if ".marlin_moe" in str(path) and self._is_open(found):
                hidden = Path(path).with_name(f".nfs{found.st_ino:08x}")
                os.rename(path, hidden)
                self.kept[found.st_dev, found.st_ino] = hidden
                return
            unlink(path, *args, **named)

        def kept_close(fd: int) -> None:
            found = os.fstat(fd)
            close(fd)
            hidden = self.kept.pop((found.st_dev, found.st_ino), None)
            if hidden is not None:
                unlink(hidden)

        monkeypatch.setattr(os, "unlink", kept_unlink)
        monkeypatch.setattr(os, "close", kept_close)

    @staticmethod
    def _is_open(found: os.stat_result) -> bool:
        for fd in os.listdir("/proc/self/fd"):
            try:
                if os.path.samestat(os.fstat(int(fd)), found):
                    return True
            except OSError:
                continue
        return False


def test_on_nfs_the_folder_goes_too(
    pair_of: Callable[[str], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair, packed = pair_of("plain"), tmp_path / "packed"
    with monkeypatch.context() as patched:
        SillyRename(patched)
        repack_checkpoint(pair.source, packed)
        unpack_checkpoint(packed, tmp_path / "again")
    assert contents(packed) == contents(pair.packed)
    assert contents(tmp_path / "again") == contents(pair.source)
    assert not (packed / WORK).exists()
    assert not (tmp_path / "again" / WORK).exists()


def test_a_folder_that_cannot_go_does_no_harm(
    pair_of: Callable[[str], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair, packed, again = pair_of("plain"), tmp_path / "packed", tmp_path / "again"
    remove = os.rmdir

    def busy(path: Any, *rest: Any, **named: Any) -> None:
        if str(path).endswith(WORK):
            Path(path, ".nfs0001").touch()
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), str(path))
        remove(path, *rest, **named)

    with monkeypatch.context() as patched:
        patched.setattr(os, "rmdir", busy)
        repack_checkpoint(pair.source, packed)
        unpack_checkpoint(packed, again)
    for place, expected in ((packed, contents(pair.packed)), (again, contents(pair.source))):
        assert (place / WORK / ".nfs0001").exists()
        assert {n: d for n, d in contents(place).items() if not n.startswith(WORK)} == expected
    assert verify_checkpoint(packed, pair.source).ok
    assert load_layers(packed).keys() == load_layers(again).keys()
    (packed / WORK / ".nfs0001").unlink()
    assert repack_checkpoint(pair.source, packed).already_complete
    assert not (packed / WORK).exists()


def test_a_lock_that_nobody_can_remove(
    pair_of: Callable[[str], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever of the folder stays, the next run says that all is done."""
    pair, unlink = pair_of("plain"), os.unlink
    for name in ("lock", "complete.json", "rest-00001.safetensors.finished.json"):
        packed = tmp_path / name

        def refuse(path: Any, *rest: Any, stays: str = name, **named: Any) -> None:
            if Path(path).name == stays:
                raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), str(path))
            unlink(path, *rest, **named)

        with monkeypatch.context() as patched:
            patched.setattr(os, "unlink", refuse)
            repack_checkpoint(pair.source, packed)
        assert (packed / WORK / name).exists()
        assert repack_checkpoint(pair.source, packed).already_complete
        assert contents(packed) == contents(pair.packed)


def test_a_fruitless_run_leaves_the_next_ones_folder_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second run begins between any two steps in which the first one cleans up."""
    steps, step = 0, 0
    while step <= steps:
        place, calls = tmp_path / f"packed-{step}", 0
        second: list[Journal] = []
        refused: list[str] = []
        first = entered(place)

        def begin(
            at: int = step, place: Path = place, second: list[Journal] = second, refused: list[str] = refused
        ) -> None:
            nonlocal calls
            calls += 1
            if calls == at + 1:
                try:
                    second.append(entered(place, "another"))
                except PackedError as error:
                    refused.append(str(error))

        with monkeypatch.context() as patched:
            for name in ("unlink", "rmdir", "close"):
                call = getattr(os, name)

                def around(*args: Any, call: Any = call, **named: Any) -> None:
                    with monkeypatch.context() as plain:
                        for other in ("unlink", "rmdir", "close"):
                            plain.setattr(os, other, originals[other])
                        begin()
                    call(*args, **named)

                patched.setattr(os, name, around)
            first.release()
        steps, step = calls, step + 1
        assert all("expected no other run" in text for text in refused)
        for other in second:
            assert json.loads((place / WORK / "run.json").read_text())["run"] == {"run": "another"}
            with pytest.raises(PackedError, match="expected no other run"):
                entered(place, "another")
            other.release()
        assert not (place / WORK).exists()
    assert steps >= 4


originals = {name: getattr(os, name) for name in ("unlink", "rmdir", "close")}


def test_an_error_while_cleaning_up_does_not_hide_the_first(
    pair_of: Callable[[str], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Fail:
        def start(self, total_bytes: int) -> None:
            pass

        def advance(self, done_bytes: int, what: str) -> None:
            def refuse(*_: Any, **__: Any) -> None:
                raise OSError(errno.EIO, os.strerror(errno.EIO))

            monkeypatch.setattr(os, "unlink", refuse)
            monkeypatch.setattr(os, "rmdir", refuse)
            raise RuntimeError("the first error")

    with pytest.raises(RuntimeError, match="the first error"):
        repack_checkpoint(pair_of("plain").source, tmp_path / "packed", workers=1, progress=Fail())


@pytest.mark.parametrize("name", ["run.json", "complete.json", "experts-0.safetensors.finished.json", "lock"])
def test_a_pipe_in_the_folder_is_not_waited_for(
    pair_of: Callable[[str], Any], tmp_path: Path, name: str
) -> None:
    pair, packed = pair_of("plain"), tmp_path / "packed"
    with pytest.raises(RuntimeError, match="stopped"):
        repack_checkpoint(pair.source, packed, workers=1, progress=StopAt("experts-1.safetensors"))
    (packed / WORK / name).unlink(missing_ok=True)
    os.mkfifo(packed / WORK / name)
    done: list[BaseException] = []

    def run() -> None:
        try:
            repack_checkpoint(pair.source, packed)
        except MarlinMoEError as error:
            done.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(timeout=30)
    assert not thread.is_alive(), "waits for a pipe"
    assert ["EINVAL" in str(error) for error in done] == [True], done
    assert not (packed / MANIFEST).exists()


@pytest.mark.parametrize("text", ["", "3", "[]", '{"id": 1}', '{"run": [1], "id": "x"}', "{" * 50_000])
def test_a_run_of_nonsense_is_refused_or_replaced(
    pair_of: Callable[[str], Any], tmp_path: Path, text: str
) -> None:
    pair, packed = pair_of("plain"), tmp_path / "packed"
    (packed / WORK).mkdir(parents=True)
    (packed / WORK / "run.json").write_text(text)
    (packed / "mine.txt").write_text("mine")
    with pytest.raises(PackedError, match=r"expected an (empty directory|interrupted run)"):
        repack_checkpoint(pair.source, packed)
    (packed / "mine.txt").unlink()
    repack_checkpoint(pair.source, packed)
    assert contents(packed) == contents(pair.packed)


def test_companions_with_long_names(own_pair: Callable[[str], Any], tmp_path: Path) -> None:
    source, packed = own_pair("plain").source, tmp_path / "new"
    names = ["ж" * 127, "ж" * 126 + "a", "模" * 85, "a" * 255]
    folder = "папка" * 20
    (source / folder).mkdir()
    for name in names:
        (source / name).write_text(name)
        (source / folder / name).write_text(name[::-1])
    repack_checkpoint(source, packed)
    for name in names:
        assert (packed / name).read_text() == name
        assert (packed / folder / name).read_text() == name[::-1]
    assert verify_checkpoint(packed, source).ok
    unpack_checkpoint(packed, tmp_path / "again")
    assert contents(tmp_path / "again") == contents(source)


def test_a_rank_that_sees_another_directory_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(durable, "LONGEST_DELAY_S", 0.1)
    first = entered(tmp_path / "shared", ranks=Ranks(rank=0, size=3))
    entered(tmp_path / "other", ranks=Ranks(rank=0, size=3)).release()
    before = contents(tmp_path)
    for place, found in ((tmp_path / "none", "none"), (tmp_path / "other", "another one")):
        rank = Journal(place, {"run": "this"}, ranks=Ranks(rank=2, size=3))
        expected = f"expected the run that rank 0 has begun there, got {found} on rank 2"
        with pytest.raises(PackedError, match=expected):
            rank.join(first.run_id)
        rank.release()
    assert contents(tmp_path) == before
    assert not (tmp_path / "none").exists()
    rank = Journal(tmp_path / "shared", {"run": "this"}, ranks=Ranks(rank=2, size=3))
    rank.join(first.run_id)
    with (tmp_path / "shared" / WORK / "lock-2").open() as lock, pytest.raises(BlockingIOError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    rank.release()
    first.release()


def test_every_run_has_a_name_of_its_own(tmp_path: Path) -> None:
    names = set()
    for _ in range(3):
        journal = entered(tmp_path / "packed", ranks=Ranks(size=2))
        names.add(json.loads((tmp_path / "packed" / WORK / "run.json").read_text())["id"])
        assert journal.run_id in names
        journal.release()
    assert len(names) == 3


def test_a_rank_waits_until_it_sees_what_rank_0_wrote(tmp_path: Path) -> None:
    """As on NFS, which may show a folder as it was."""
    rank = Journal(tmp_path / "packed", {"run": "this"}, ranks=Ranks(rank=1, size=2))
    first = Journal(tmp_path / "packed", {"run": "this"}, ranks=Ranks(rank=0, size=2))
    late = threading.Timer(0.7, first.open)
    late.start()
    rank.join(first.run_id)
    late.join()
    rank.release()
    first.release()


def test_a_folder_of_that_name_that_is_not_ours(pair_of: Callable[[str], Any], tmp_path: Path) -> None:
    kept = tmp_path / "packed" / WORK / "notes.txt"
    kept.parent.mkdir(parents=True)
    kept.write_text("mine")
    with pytest.raises(PackedError, match=r"expected the work folder of an interrupted run, got notes\.txt"):
        repack_checkpoint(pair_of("plain").source, tmp_path / "packed")
    assert kept.read_text() == "mine"
    shutil.move(kept.parent, tmp_path / "elsewhere")
    kept.parent.symlink_to(tmp_path / "elsewhere")
    kept.unlink()
    with pytest.raises(PackedError, match=r"got a link"):
        repack_checkpoint(pair_of("plain").source, tmp_path / "packed")


def test_a_companion_named_like_a_lock(own_pair: Callable[[str], Any], tmp_path: Path) -> None:
    """Its record is no lock of a rank, and what is finished is not made again."""
    source, packed = own_pair("plain").source, tmp_path / "new"
    (source / "lock-1").write_text("key")
    with pytest.raises(RuntimeError, match="stopped"):
        repack_checkpoint(source, packed, progress=StopAt("config.json"), workers=1)
    made = {path.name: path.stat().st_ino for path in packed.iterdir() if path.is_file()}
    repack_checkpoint(source, packed)
    assert {name: (packed / name).stat().st_ino for name in made} == made
    assert (packed / "lock-1").read_text() == "key"
