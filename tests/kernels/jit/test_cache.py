"""Entries are whole or absent, and the folder is the user's alone."""

import contextlib
import errno
import json
import os
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from marlin_moe.kernels.errors import JitError, MarlinMoEWarning
from marlin_moe.kernels.jit import cache as cache_module
from marlin_moe.kernels.jit import folder as folder_module
from marlin_moe.kernels.jit.cache import (
    cache_root,
    check_cache,
    decode_entry,
    encode_entry,
    read_entry,
    write_entry,
)
from marlin_moe.kernels.jit.compile import CompiledKernel
from marlin_moe.kernels.jit.ptxas import FunctionUsage

KEY, OTHER_KEY = "ab" * 32, "cd" * 32
COMPILED = CompiledKernel(
    key=KEY,
    arch="sm_90a",
    symbols=(("k<1>", "_Z1kILi1EEvv"),),
    functions=(FunctionUsage(symbol="_Z1kILi1EEvv", registers=40, spill_store_bytes=4),),
    warnings=("a.cu(1): warning #1-D: text\n  x",),
    seconds=0.25,
    cubin=b"\x7fELF" + bytes(range(256)) * 20,
)
ENTRY = encode_entry(COMPILED)


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MARLIN_MOE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(cache_module, "_unusable", set())
    return tmp_path / "cache"


def entry_path(root: Path) -> Path:
    return root / "cubin" / "v1" / KEY


def test_an_entry_comes_back_equal_and_private(root: Path) -> None:
    assert read_entry(KEY) is None
    assert not root.exists(), "reading makes no folder"
    write_entry(COMPILED)
    assert read_entry(KEY) == COMPILED
    assert read_entry(OTHER_KEY) is None
    for folder in (root, root / "cubin", root / "cubin" / "v1"):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(entry_path(root).stat().st_mode) == 0o600
    assert os.listdir(root / "cubin" / "v1") == [KEY]


@given(length=st.integers(0, len(ENTRY) - 1))
def test_an_entry_cut_short_is_none(length: int) -> None:
    assert decode_entry(KEY, ENTRY[:length]) is None


@given(bit=st.integers(0, len(ENTRY) * 8 - 1))
def test_an_entry_with_a_flipped_bit_is_none(bit: int) -> None:
    broken = bytearray(ENTRY)
    broken[bit // 8] ^= 1 << bit % 8
    assert decode_entry(KEY, bytes(broken)) is None


@pytest.mark.parametrize(
    "foreign",
    [
        b"",
        b"not an entry",
        ENTRY + b"\0",
        encode_entry(replace(COMPILED, key=OTHER_KEY)),
        cache_module.HEADER.pack(b"MMOECUBN", 1, bytes.fromhex(KEY), 2, 0, b"") + b"{}",
    ],
    ids=["empty", "text", "longer", "another key", "no facts"],
)
def test_a_broken_or_foreign_file_is_a_miss_and_is_replaced(root: Path, foreign: bytes) -> None:
    write_entry(COMPILED)
    entry_path(root).write_bytes(foreign)
    assert read_entry(KEY) is None
    write_entry(COMPILED)
    assert read_entry(KEY) == COMPILED


def test_whole_facts_of_another_shape_are_a_miss() -> None:
    for facts in (
        {},
        [],
        {**json.loads(meta_of(ENTRY)), "more": 1},
        {**json.loads(meta_of(ENTRY)), "symbols": 5},
    ):
        meta = json.dumps(facts).encode()
        digest = xxhash.xxh3_128_digest(meta)
        header = cache_module.HEADER.pack(b"MMOECUBN", 1, bytes.fromhex(KEY), len(meta), 0, digest)
        assert decode_entry(KEY, header + meta) is None, facts


def meta_of(entry: bytes) -> bytes:
    start, nbytes = cache_module.HEADER.size, cache_module.HEADER.unpack_from(entry)[3]
    return entry[start : start + nbytes]


def test_a_link_or_a_writable_entry_is_a_miss(root: Path, tmp_path: Path) -> None:
    write_entry(COMPILED)
    entry_path(root).chmod(0o620)
    assert read_entry(KEY) is None
    entry_path(root).chmod(0o600)
    assert read_entry(KEY) == COMPILED
    entry_path(root).rename(tmp_path / "elsewhere")
    entry_path(root).symlink_to(tmp_path / "elsewhere")
    assert read_entry(KEY) is None
    write_entry(COMPILED)
    assert not entry_path(root).is_symlink()
    assert read_entry(KEY) == COMPILED


@pytest.mark.parametrize("name", ["", "cubin", "cubin/v1"])
@pytest.mark.parametrize("mode", [0o720, 0o702, 0o777])
@pytest.mark.parametrize(
    "act", [lambda: read_entry(KEY), lambda: write_entry(COMPILED)], ids=["read", "write"]
)
def test_a_folder_that_others_can_write_is_refused(
    root: Path, name: str, mode: int, act: Callable[[], object]
) -> None:
    write_entry(COMPILED)
    (root / name).chmod(mode)
    with pytest.raises(
        JitError, match=rf"only user \d+ can write.*got owner \d+ and mode {mode:04o}.*chmod go-w"
    ):
        act()


def test_a_link_to_a_folder_that_others_can_write_is_refused(root: Path, tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    root.symlink_to(shared)
    with pytest.raises(JitError, match="mode 0777"):
        write_entry(COMPILED)
    shared.chmod(0o700)
    write_entry(COMPILED)
    assert read_entry(KEY) == COMPILED


def test_a_folder_of_another_user_is_refused(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_entry(COMPILED)
    me = os.geteuid()
    monkeypatch.setattr(folder_module.os, "geteuid", lambda: me + 1)
    with pytest.raises(JitError, match=f"only user {me + 1} can write.*got owner {me}"):
        read_entry(KEY)


def test_a_cache_that_cannot_be_made_is_a_warning_once(
    tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MARLIN_MOE_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.warns(MarlinMoEWarning, match=r"file/cache: expected to keep.*set MARLIN_MOE_CACHE"):
        write_entry(COMPILED)
    write_entry(COMPILED)  # a second warning would be an error
    assert read_entry(KEY) is None


@pytest.mark.parametrize("number", [errno.EROFS, errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("call", ["mkdir", "fsync", "replace"])
def test_a_write_that_fails_is_a_warning_and_leaves_nothing(
    root: Path, monkeypatch: pytest.MonkeyPatch, number: int, call: str
) -> None:
    def fail(*arguments: object, **options: object) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail)
        with pytest.warns(MarlinMoEWarning, match=os.strerror(number)):
            write_entry(COMPILED)
    assert [path for path in root.rglob("*") if path.is_file()] == []
    write_entry(COMPILED)
    assert read_entry(KEY) == COMPILED


def test_a_read_only_cache_is_still_read(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read_only(*arguments: object, **options: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    write_entry(COMPILED)
    monkeypatch.setattr(os, "mkdir", read_only)
    assert read_entry(KEY) == COMPILED


def test_a_reader_never_sees_half_an_entry(root: Path) -> None:
    entries = [replace(COMPILED, cubin=bytes([i]) * 200_000) for i in range(4)]
    write_entry(entries[0])
    stop = threading.Event()

    def keep_writing(entry: CompiledKernel) -> None:
        while not stop.is_set():
            write_entry(entry)

    writers = [threading.Thread(target=keep_writing, args=(entry,)) for entry in entries[1:]]
    for writer in writers:
        writer.start()
    try:
        found = [read_entry(KEY) for _ in range(200)]
    finally:
        stop.set()
        for writer in writers:
            writer.join()
    assert all(entry in entries for entry in found)
    assert os.listdir(root / "cubin" / "v1") == [KEY]


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MARLIN_MOE_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", "/home/someone")
    assert cache_root() == Path("/home/someone/.cache/marlin-moe")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache_root() == Path("/home/someone/.cache/marlin-moe")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache_root() == Path("/xdg/marlin-moe")
    monkeypatch.setenv("MARLIN_MOE_CACHE", "~/own")
    assert cache_root() == Path("/home/someone/own")
    monkeypatch.setenv("MARLIN_MOE_CACHE", "own")
    with pytest.raises(JitError, match="MARLIN_MOE_CACHE: expected an absolute path, got 'own'"):
        cache_root()
    monkeypatch.setenv("MARLIN_MOE_CACHE", "~nosuchuser/own")
    with pytest.raises(JitError, match=r"MARLIN_MOE_CACHE: .*got '~nosuchuser/own', and no home is known"):
        cache_root()


def test_without_a_home_nothing_is_put_into_the_working_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MARLIN_MOE_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # as for a user whom the system has not
    with pytest.raises(JitError, match=r"'~/\.cache', and no home is known.*Set MARLIN_MOE_CACHE"):
        cache_root()


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server, contextlib.chdir(path.parent):  # its paths are short
        server.bind(path.name)


@pytest.mark.parametrize("make", [os.mkfifo, Path.mkdir, make_socket], ids=["fifo", "folder", "socket"])
def test_what_is_no_file_is_a_miss_and_is_replaced(root: Path, make: Callable[[Path], None]) -> None:
    """Read in a process of its own, which can be ended if it waits for a writer of the FIFO."""
    write_entry(COMPILED)
    entry_path(root).unlink()
    make(entry_path(root))
    script = "import sys; from marlin_moe.kernels.jit.cache import read_entry; print(read_entry(sys.argv[1]))"
    read = subprocess.run(
        [sys.executable, "-W", "error", "-c", script, KEY],
        env=os.environ | {"PYTHONSAFEPATH": "1"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (read.stdout, read.stderr) == ("None\n", "")
    assert write_entry(COMPILED) is None
    assert read_entry(KEY) == COMPILED
    assert os.listdir(root / "cubin" / "v1") == [KEY]


def test_a_folder_with_files_in_an_entrys_place_stays_and_is_named(root: Path) -> None:
    write_entry(COMPILED)
    entry_path(root).unlink()
    entry_path(root).mkdir()
    (entry_path(root) / "file").touch()
    assert read_entry(KEY) is None
    with pytest.warns(MarlinMoEWarning, match=f"a folder with files lies where a kernel belongs: '{KEY}'"):
        reason = write_entry(COMPILED)
    assert reason is not None
    assert os.listdir(root / "cubin" / "v1") == [KEY]


def test_checking_makes_no_folder_unless_it_is_to_and_says_what_cannot_be(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_cache()
    assert not root.exists()
    check_cache(create=True)
    assert stat.S_IMODE((root / "cubin" / "v1").stat().st_mode) == 0o700
    root.chmod(0o777)
    with pytest.raises(JitError, match="mode 0777"):
        check_cache()
    (root.parent / "file").touch()
    monkeypatch.setenv("MARLIN_MOE_CACHE", str(root.parent / "file"))
    with pytest.raises(JitError, match=r"/file: expected a folder to store.*Nothing was stored"):
        check_cache(create=True)
    with pytest.warns(MarlinMoEWarning, match=r"/file: expected to keep compiled kernels there"):
        check_cache()


GONE = 2**22 + 1  # more than Linux ever gives


@pytest.mark.parametrize(
    ("pid", "age_s", "stays"),
    [
        (GONE, 3500, True),
        (GONE, 3700, False),
        (9_999_999_999, 3700, False),
        (os.getpid(), 3700, True),
        (os.getpid(), 86_000, True),
        (os.getpid(), 87_000, False),
    ],
    ids=["gone", "gone, an hour", "no number of a process", "running", "running, hours", "running, a day"],
)
def test_what_killed_compilers_left_is_removed_when_an_entry_is_written(
    root: Path, pid: int, age_s: int, stays: bool
) -> None:
    write_entry(COMPILED)
    folder = root / "cubin" / "v1"
    left, foreign = folder / f".{OTHER_KEY}-{pid}-{'0f' * 8}", folder / f"{OTHER_KEY}-{pid}-{'0f' * 8}"
    for path in (left, foreign, entry_path(root)):
        path.touch()
        os.utime(path, (time.time() - age_s,) * 2)
    write_entry(replace(COMPILED, key="ef" * 32))
    assert left.exists() == stays
    assert foreign.exists()
    assert entry_path(root).exists()


def test_a_process_of_another_user_is_running(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(pid: int, number: int) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "kill", refuse)
    write_entry(COMPILED)
    left = root / "cubin" / "v1" / f".{OTHER_KEY}-{GONE}-{'0f' * 8}"
    left.touch()
    os.utime(left, (time.time() - 3700,) * 2)
    write_entry(COMPILED)
    assert left.exists()
