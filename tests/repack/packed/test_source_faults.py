"""A source that cannot be read, or is cut short while it is repacked: an error, and nothing finished."""

from __future__ import annotations

import errno
import itertools
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from marlin_moe import MarlinMoEError, MarlinMoEWarning, repack_checkpoint, verify_checkpoint
from marlin_moe.repack.errors import CheckpointError, PackedError
from packed_files import MANIFEST, contents


def is_of(fd: int, folder: Path) -> bool:
    return os.readlink(f"/proc/self/fd/{fd}").startswith(str(folder))


def fail_reading(monkeypatch: pytest.MonkeyPatch, source: Path, number: int) -> list[int]:
    """Reads of the source's data fail from the given one on; the list grows by one each time."""
    failed: list[int] = []
    read, copy, seen = os.preadv, os.copy_file_range, [0]

    def counted(fd: int, offset: int) -> None:
        if is_of(fd, source):
            seen[0] += 1
            if seen[0] >= number:
                failed.append(offset)
                raise OSError(errno.EIO, os.strerror(errno.EIO))

    def preadv(fd: int, buffers: Any, offset: int) -> int:
        counted(fd, offset)
        return read(fd, buffers, offset)

    def copy_file_range(src: int, dst: int, count: int, offset_src: int, offset_dst: int) -> int:
        counted(src, offset_src)
        return copy(src, dst, count, offset_src, offset_dst)

    monkeypatch.setattr(os, "preadv", preadv)
    monkeypatch.setattr(os, "copy_file_range", copy_file_range)
    return failed


@pytest.mark.parametrize("workers", [1, 3])
def test_read_errors_wherever_they_are(
    pair_of: Callable[[str], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    pair, errors = pair_of("plain"), 0
    for number in itertools.count(1, 3):
        packed = tmp_path / f"packed-{number}"
        with monkeypatch.context() as patched:
            failed = fail_reading(patched, pair.source, number)
            try:
                repack_checkpoint(pair.source, packed, workers=workers, block_bytes=1)
            except MarlinMoEError as error:
                message = str(error)
                assert "Input/output error" in message, message
                assert str(pair.source) in message, message
                errors += 1
        if not failed:
            break
        assert not (packed / MANIFEST).exists(), number
        repack_checkpoint(pair.source, packed, workers=workers)
        assert contents(packed) == contents(pair.packed), number
    assert errors > 10
    assert contents(packed) == contents(pair.packed)


class Damage:
    """`Progress` that runs `damage` once, at the given `advance`."""

    def __init__(self, number: int, damage: Callable[[], object]) -> None:
        self.number, self.damage = number, damage

    def start(self, total_bytes: int) -> None:
        pass

    def advance(self, done_bytes: int, what: str) -> None:
        self.number -= 1
        if self.number == 0:
            self.damage()


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("number", [1, 4, 9])
@pytest.mark.parametrize(
    "file", ["model-00001-of-00003.safetensors", "config.json", "generation_config.json"]
)
def test_a_source_cut_short_during_the_run(
    own_pair: Callable[[str], Any], tmp_path: Path, file: str, number: int, workers: int
) -> None:
    source, packed = own_pair("plain").source, tmp_path / "new"
    place = source / file
    damage = Damage(number, lambda: os.truncate(place, place.stat().st_size // 2))
    with pytest.raises(MarlinMoEError, match=r"cut short|changed|stays as it is") as caught:
        repack_checkpoint(source, packed, workers=workers, block_bytes=1, progress=damage)
    assert damage.number <= 0, "the source was not cut"
    assert file in str(caught.value)
    assert not (packed / MANIFEST).exists()
    if file == "generation_config.json":  # any bytes will do: those that are there now are the source's
        repack_checkpoint(source, packed, workers=workers)
        assert verify_checkpoint(packed, source).ok
        return
    with pytest.raises(MarlinMoEError):
        repack_checkpoint(source, packed, workers=workers)
    assert not (packed / MANIFEST).exists()


@pytest.mark.parametrize("what", ["destination", "source"])
def test_no_permission(
    pair_of: Callable[[str], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """The system's refusal, made here: whoever runs the tests may be allowed everything."""
    pair, packed = pair_of("plain"), tmp_path / "packed"
    open_file, folder = os.open, packed if what == "destination" else pair.source

    def refuse(path: Any, flags: int, *rest: Any, **named: Any) -> int:
        if str(path).startswith(str(folder)) and (what == "source" or flags & os.O_CREAT):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return open_file(path, flags, *rest, **named)

    with monkeypatch.context() as patched:
        patched.setattr(os, "open", refuse)
        with pytest.raises(MarlinMoEError, match=r"Permission denied") as caught:
            repack_checkpoint(pair.source, packed)
    assert str(folder) in str(caught.value)
    assert not (packed / MANIFEST).exists()
    repack_checkpoint(pair.source, packed)
    assert contents(packed) == contents(pair.packed)


class During:
    """`Progress` that does something once, when bytes of the first file have been made."""

    def __init__(self, act: Callable[[], object]) -> None:
        self.act: Callable[[], object] | None = act

    def start(self, total_bytes: int) -> None:
        """Nothing."""

    def advance(self, done_bytes: int, what: str) -> None:
        """The act, the first time."""
        act, self.act = self.act, None
        if act is not None:
            act()


@pytest.mark.parametrize("name", ["more.json", "folder/more.txt", "more.bin"])
def test_files_that_come_during_the_run(own_pair: Callable[[str], Any], tmp_path: Path, name: str) -> None:
    """A download that goes on: what it adds would be missing, and the same command could never run again."""
    source, packed = own_pair("plain").source, tmp_path / "new"

    def come() -> None:
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_text("{}")

    with pytest.raises(CheckpointError, match=rf"stays as it is .*got a change of {name}"):
        repack_checkpoint(source, packed, progress=During(come))
    assert not (packed / MANIFEST).exists()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", MarlinMoEWarning)  # more.bin is not copied
        repack_checkpoint(source, packed)
        assert repack_checkpoint(source, packed).already_complete


def test_a_folder_that_cannot_be_listed(
    own_pair: Callable[[str], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = own_pair("plain").source
    (source / "code").mkdir()
    (source / "code" / "model.py").write_text("1")
    listed = os.scandir

    def refusing(path: Any) -> Any:
        if Path(path).name == "code":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return listed(path)

    monkeypatch.setattr(os, "scandir", refusing)
    with pytest.raises(PackedError, match=r"code: expected a folder that can be listed.*Permission denied"):
        repack_checkpoint(source, tmp_path / "new")


def test_a_companion_that_cannot_be_read(
    own_pair: Callable[[str], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Said before hours of work, by its own name."""
    source = own_pair("plain").source
    real = os.access
    monkeypatch.setattr(
        os, "access", lambda path, mode: Path(path).name != "generation_config.json" and real(path, mode)
    )
    with pytest.raises(
        PackedError, match=r"generation_config\.json: expected a file that this user can read"
    ):
        repack_checkpoint(source, tmp_path / "new")
