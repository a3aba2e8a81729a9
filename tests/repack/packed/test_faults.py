"""A repack that is stopped, refused or starved leaves nothing that loads, and resumes to the same bytes."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from checkpoints import CheckpointSpec, make_source, write_checkpoint, write_source
from marlin_moe import MarlinMoEError, load_layers, repack_checkpoint, unpack_checkpoint, verify_checkpoint
from marlin_moe.repack.errors import CheckpointError, ExpertsError, PackedError
from mutations import flip_tensor_bit, replace_tensor
from packed_files import MANIFEST, contents

WORK = ".marlin_moe"


class StopAt:
    """`Progress` that stops the run in the middle of a file."""

    def __init__(self, file: str, error: BaseException | None = None) -> None:
        self.file = file
        self.error = error or RuntimeError("stopped")

    def start(self, total_bytes: int) -> None:
        pass

    def advance(self, done_bytes: int, what: str) -> None:
        if what == self.file:
            raise self.error


def assert_unfinished(path: Path) -> None:
    """Nothing that loads, and no final name that is not a whole file."""
    assert not (path / MANIFEST).exists()
    with pytest.raises(MarlinMoEError):
        load_layers(path)
    with pytest.raises(PackedError, match=r"an interrupted run\. Run the same command again"):
        verify_checkpoint(path)


@pytest.mark.parametrize(
    "file",
    ["experts-0.safetensors", "experts-1.safetensors", "rest-00001.safetensors", "generation_config.json"],
)
def test_a_stopped_run_resumes_and_redoes_nothing(
    pair_of: Callable[[str], Any], tmp_path: Path, file: str
) -> None:
    pair, packed = pair_of("plain"), tmp_path / "packed"
    with pytest.raises(RuntimeError, match="stopped"):
        repack_checkpoint(pair.source, packed, workers=1, progress=StopAt(file))
    if file == "experts-0.safetensors":
        assert not packed.exists(), "a run that finished nothing leaves nothing"
        return
    assert_unfinished(packed)
    final = [p for p in packed.iterdir() if p.name != WORK]
    whole = contents(pair.packed)
    assert all(p.read_bytes() == whole[p.name] for p in final)
    before = {p.name: (p.stat().st_ino, p.stat().st_mtime_ns) for p in final}
    report = repack_checkpoint(pair.source, packed)
    assert {n: ((packed / n).stat().st_ino, (packed / n).stat().st_mtime_ns) for n in before} == before
    assert report.resumed_files == len(before) > 0
    assert contents(packed) == whole


KILLED = """
import os, signal, sys
from marlin_moe import repack_checkpoint

class Kill:
    count = 0
    def start(self, total_bytes):
        pass
    def advance(self, done_bytes, what):
        self.count += 1
        if self.count == int(sys.argv[3]):
            os.kill(os.getpid(), signal.SIGKILL)

repack_checkpoint(sys.argv[1], sys.argv[2], workers=1, block_bytes=1, progress=Kill())
"""


@pytest.mark.parametrize("advance", [6, 12, 20])
def test_a_killed_run_resumes_to_the_same_bytes(
    pair_of: Callable[[str], Any], tmp_path: Path, advance: int
) -> None:
    pair, packed = pair_of("plain"), tmp_path / "packed"
    script = [sys.executable, "-c", KILLED, str(pair.source), str(packed), str(advance)]
    result = subprocess.run(script, capture_output=True, text=True, check=False, timeout=300)
    assert result.returncode == -signal.SIGKILL, result.stderr
    assert_unfinished(packed)
    before = {p.name: p.stat().st_ino for p in packed.iterdir() if p.name != WORK}
    report = repack_checkpoint(pair.source, packed)
    assert report.resumed_files == len(before)
    assert all((packed / name).stat().st_ino == inode for name, inode in before.items())
    assert contents(packed) == contents(pair.packed)


def test_a_run_killed_while_it_removes_its_folder_is_complete(
    pair_of: Callable[[str], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair, packed = pair_of("plain"), tmp_path / "packed"
    unlink, removed = Path.unlink, []

    def stop(path: Path, missing_ok: bool = False) -> None:
        if path.name.endswith(".finished.json"):
            removed.append(path)
            if len(removed) == 3:
                raise RuntimeError("stopped")
        unlink(path, missing_ok=missing_ok)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "unlink", stop)
        with pytest.raises(RuntimeError, match="stopped"):
            repack_checkpoint(pair.source, packed)
    assert verify_checkpoint(packed, pair.source).ok
    report = repack_checkpoint(pair.source, packed)
    assert report.resumed_files == report.files == len(contents(pair.packed))
    assert contents(packed) == contents(pair.packed)


def test_a_second_run_is_kept_out(pair_of: Callable[[str], Any], tmp_path: Path) -> None:
    pair, packed = pair_of("plain"), tmp_path / "packed"
    tried = []

    class SecondRun:
        def start(self, total_bytes: int) -> None:
            pass

        def advance(self, done_bytes: int, what: str) -> None:
            if not tried:
                with pytest.raises(
                    PackedError, match=rf"lock: expected no other run .*process {os.getpid()}"
                ):
                    repack_checkpoint(pair.source, packed)
                tried.append(what)

    repack_checkpoint(pair.source, packed, progress=SecondRun())
    assert len(tried) == 1
    assert contents(packed) == contents(pair.packed)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_an_error_with_its_errno(
    pair_of: Callable[[str], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    pair, packed = pair_of("plain"), tmp_path / "packed"
    allocate, calls = os.posix_fallocate, []

    def full(fd: int, offset: int, length: int) -> None:
        calls.append(length)
        if length > 100_000 and len([c for c in calls if c > 100_000]) == 2:
            raise OSError(number, os.strerror(number))
        allocate(fd, offset, length)

    with monkeypatch.context() as patched:
        patched.setattr(os, "posix_fallocate", full)
        name = f"{errno.errorcode[number]}, errno {number}"
        with pytest.raises(
            PackedError, match=rf"experts-1.*allocating \d+ bytes failed: .*{name}\).*goes on"
        ):
            repack_checkpoint(pair.source, packed, workers=1)
    assert_unfinished(packed)
    assert sorted(p.name for p in packed.iterdir()) == [WORK, "experts-0.safetensors"]
    assert not list((packed / WORK).glob("*.partial"))
    assert repack_checkpoint(pair.source, packed).resumed_files == 1
    assert contents(packed) == contents(pair.packed)


@pytest.mark.parametrize("call", ["pwrite", "fsync", "rename"])
def test_a_failing_system_call_is_an_error_with_its_errno(
    pair_of: Callable[[str], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    pair, packed = pair_of("plain"), tmp_path / "packed"

    def fail(*_: Any) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patched:
        patched.setattr(os, call, fail)
        with pytest.raises(PackedError, match=r"EIO, errno 5"):
            repack_checkpoint(pair.source, packed)
    assert not (packed / MANIFEST).exists()
    repack_checkpoint(pair.source, packed)
    assert contents(packed) == contents(pair.packed)


def test_a_header_that_cannot_be_written_leaves_no_descriptor(
    pair_of: Callable[[str], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair, packed = pair_of("plain"), tmp_path / "packed"

    write = os.pwrite

    def fail(fd: int, *rest: Any) -> int:
        if "experts-" in os.readlink(f"/proc/self/fd/{fd}"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return write(fd, *rest)

    before = os.listdir("/proc/self/fd")
    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", fail)
        for _ in range(3):
            with pytest.raises(PackedError, match=r"experts-0.*EIO"):
                repack_checkpoint(pair.source, packed, workers=1)
    assert os.listdir("/proc/self/fd") == before
    assert not packed.exists()


def test_a_source_that_changes_during_the_run_is_an_error(
    own_pair: Callable[[str], Any], tmp_path: Path
) -> None:
    source, packed = own_pair("plain").source, tmp_path / "new"

    class Change:
        changed = False

        def start(self, total_bytes: int) -> None:
            pass

        def advance(self, done_bytes: int, what: str) -> None:
            if what.startswith("rest") and not self.changed:
                self.changed = True
                time.sleep(0.01)
                flip_tensor_bit(source, "model.layers.1.mlp.experts.0.up_proj.weight_packed")

    with pytest.raises(CheckpointError, match="expected a source that stays as it is"):
        repack_checkpoint(source, packed, progress=Change())
    assert_unfinished(packed)
    repack_checkpoint(source, packed)
    assert verify_checkpoint(packed, source).ok


def test_values_that_no_layer_can_have_leave_nothing_that_loads(tmp_path: Path) -> None:
    source, packed = tmp_path / "source", tmp_path / "packed"
    write_checkpoint(source, CheckpointSpec(num_layers=2))
    name = "model.layers.1.mlp.experts.3.down_proj.weight_scale"
    replace_tensor(source, name, lambda tensor: tensor.fill_(float("nan")))
    with pytest.raises(ExpertsError, match=name.replace(".", r"\.")):
        repack_checkpoint(source, packed, workers=1)
    assert_unfinished(packed)
    assert sorted(p.name for p in packed.iterdir()) == [WORK, "experts-0.safetensors"]


def odd_checkpoint(path: Path, *, spare: int) -> None:
    """An intermediate size of 68: 4 fields of the last word belong to no weight; they hold `spare`."""
    source = make_source(CheckpointSpec(intermediate_size=72, group_size=None, symmetric=False))
    for name, tensor in source.tensors.items():
        if ".experts." not in name:
            continue
        owned = tensor.clone()
        if "down_proj.weight_packed" in name:
            owned[:, -1] = (tensor[:, -1] & 0xFFFF) | spare
        elif "down_proj" not in name and name.endswith("weight_zero_point"):
            owned[-1] = (tensor[-1] & 0xFFFF) | spare
        elif "down_proj" not in name and not name.endswith("weight_shape"):
            owned = tensor[:68].clone()
        elif name.endswith("weight_shape"):
            owned[tensor == 72] = 68
        source.tensors[name] = owned
    write_source(path, source)


def test_padding_bits_that_could_not_be_restored_are_refused(tmp_path: Path) -> None:
    odd_checkpoint(tmp_path / "zeros", spare=0)
    repack_checkpoint(tmp_path / "zeros", tmp_path / "packed")
    assert verify_checkpoint(tmp_path / "packed", tmp_path / "zeros").ok
    unpack_checkpoint(tmp_path / "packed", tmp_path / "again")
    assert contents(tmp_path / "again") == contents(tmp_path / "zeros")
    odd_checkpoint(tmp_path / "bits", spare=1 << 16)
    with pytest.raises(ExpertsError) as caught:
        repack_checkpoint(tmp_path / "bits", tmp_path / "refused", workers=1)
    for field in ("w13_weight_zero_point", "w2_weight_packed"):
        assert f"experts.3 {field}: expected zeros in the 4 fields" in str(caught.value)
    assert not (tmp_path / "refused").exists()


def test_a_destination_of_something_else_is_refused(pair_of: Callable[[str], Any], tmp_path: Path) -> None:
    pair = pair_of("plain")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    before = contents(tmp_path)
    for place, found in (
        (tmp_path / "mine", r"got 1 files or folders \(notes\.txt\)"),
        (tmp_path / "file", "expected a directory or nothing there, got a file"),
        (pair_of("padded").packed, "got a finished packed checkpoint that differs from it"),
        (pair.source, "outside the source"),
        (pair.source / "packed", "outside the source"),
        (pair.source.parent, "outside"),
    ):
        with pytest.raises(PackedError, match=found):
            repack_checkpoint(pair.source, place)
    assert contents(tmp_path) == before


def test_a_run_of_another_source_is_not_resumed(pair_of: Callable[[str], Any], tmp_path: Path) -> None:
    packed = tmp_path / "packed"
    with pytest.raises(RuntimeError, match="stopped"):
        repack_checkpoint(pair_of("plain").source, packed, progress=StopAt("experts-1.safetensors"))
    with pytest.raises(PackedError, match="expected an interrupted run of the same source"):
        repack_checkpoint(pair_of("padded").source, packed)
    repack_checkpoint(pair_of("plain").source, packed)
    assert contents(packed) == contents(pair_of("plain").packed)


def test_a_packed_checkpoint_is_not_packed_again(pair_of: Callable[[str], Any], tmp_path: Path) -> None:
    with pytest.raises(PackedError, match="already packed"):
        repack_checkpoint(pair_of("plain").packed, tmp_path / "again")
    assert not (tmp_path / "again").exists()


def test_a_destination_without_permission(pair_of: Callable[[str], Any], tmp_path: Path) -> None:
    if os.geteuid() == 0:
        place = Path("/proc/nothing")  # root may write anywhere but here
    else:
        place = tmp_path / "closed" / "packed"
        place.parent.mkdir(mode=0o500)
    with pytest.raises(PackedError, match=r"opening the destination failed: .*errno \d+\)"):
        repack_checkpoint(pair_of("plain").source, place)


@pytest.mark.parametrize("name", ["model-00001-of-00003.safetensors", "config.json"])
def test_a_source_that_changes_after_it_was_opened(
    own_pair: Callable[[str], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Its headers were read before, its bytes are after: neither is the whole source."""
    from marlin_moe.repack import store
    from marlin_moe.repack.checkpoint import Checkpoint

    source = own_pair("plain").source

    class OpenedTooEarly(Checkpoint):
        def __init__(self, *args: Any, **named: Any) -> None:
            super().__init__(*args, **named)
            time.sleep(0.02)
            content = (source / name).read_bytes()
            (source / name).write_bytes(
                content.replace(b'"silu"', b'"gelu"') if name == "config.json" else content
            )

    monkeypatch.setattr(store, "Checkpoint", OpenedTooEarly)
    with pytest.raises(CheckpointError, match=rf"stays as it is .* got a change of {name}"):
        repack_checkpoint(source, tmp_path / "new")
    assert not (tmp_path / "new").exists()
