"""Workers and ranks make the same bytes as one process, also when one of them is lost."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from checkpoints import CheckpointSpec, make_source, write_checkpoint, write_source
from marlin_moe import MarlinMoEError, repack_checkpoint
from marlin_moe.repack.errors import PackedError
from marlin_moe.repack.ranks import ranks_from_environment
from packed_files import MANIFEST, contents

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
SPEC = CheckpointSpec(num_layers=6, num_experts=4, shards=3)


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(a source, its packed checkpoint as one worker makes it)."""
    base = tmp_path_factory.mktemp("ranks")
    write_checkpoint(base / "source", SPEC)
    repack_checkpoint(base / "source", base / "packed", workers=1)
    return base / "source", base / "packed"


class Threads:
    """`Progress` that notes who reports."""

    def __init__(self) -> None:
        self.names: set[str] = set()
        self.total = self.done = 0

    def start(self, total_bytes: int) -> None:
        self.total = total_bytes

    def advance(self, done_bytes: int, what: str) -> None:
        self.names.add(threading.current_thread().name)
        self.done += done_bytes


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_any_number_of_workers_makes_the_same_bytes(
    single: tuple[Path, Path], tmp_path: Path, workers: int
) -> None:
    watch = Threads()
    report = repack_checkpoint(single[0], tmp_path / "packed", workers=workers, progress=watch)
    assert contents(tmp_path / "packed") == contents(single[1])
    assert (report.workers, report.ranks) == (workers, 1)
    assert watch.done == watch.total
    assert len(watch.names) == workers


def test_dead_experts_are_listed_alike_whatever_the_blocks_are(tmp_path: Path) -> None:
    source = make_source(CheckpointSpec())
    for name, tensor in source.tensors.items():
        if name.endswith(("1.up_proj.weight_scale", "2.down_proj.weight_scale", "0.down_proj.weight_scale")):
            tensor.zero_()
    write_source(tmp_path / "source", source)
    made = []
    for name, block_bytes in (("one", 1), ("all", 1 << 30)):
        repack_checkpoint(
            tmp_path / "source", tmp_path / name, workers=1, block_bytes=block_bytes, allow_dead_experts=True
        )
        made.append(contents(tmp_path / name))
    assert made[0] == made[1]


def test_no_manifest_without_the_files_that_another_rank_says_it_made(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "source", num_layers=2)

    class Elsewhere(Threads):
        """What a rank with a directory of its own leaves in this one: nothing."""

        def advance(self, done_bytes: int, what: str) -> None:
            super().advance(done_bytes, what)
            if what != "experts-0.safetensors":
                (tmp_path / "packed" / "experts-0.safetensors").unlink(missing_ok=True)

    with pytest.raises(MarlinMoEError, match=r"before the manifest, got no experts-0\.safetensors"):
        repack_checkpoint(tmp_path / "source", tmp_path / "packed", workers=1, progress=Elsewhere())
    assert not (tmp_path / "packed" / MANIFEST).exists()
    repack_checkpoint(tmp_path / "source", tmp_path / "packed", workers=1)
    assert (tmp_path / "packed" / MANIFEST).exists()


def test_the_first_error_stops_the_other_workers(single: tuple[Path, Path], tmp_path: Path) -> None:
    class Fail(Threads):
        def advance(self, done_bytes: int, what: str) -> None:
            super().advance(done_bytes, what)
            if what == "experts-1.safetensors":
                raise RuntimeError("stopped")

    watch = Fail()
    with pytest.raises(RuntimeError, match="stopped"):
        repack_checkpoint(single[0], tmp_path / "packed", workers=3, progress=watch, block_bytes=1)
    assert watch.done < watch.total
    assert not (tmp_path / "packed" / MANIFEST).exists()
    repack_checkpoint(single[0], tmp_path / "packed", workers=3)
    assert contents(tmp_path / "packed") == contents(single[1])


def torchrun(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Four ranks on this machine."""
    own = os.environ | {"PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1"} | environment
    command = [*TORCHRUN, *arguments]
    return subprocess.run(command, env=own, capture_output=True, text=True, check=False, timeout=300)


RANK = """
import os, signal, sys
from marlin_moe import repack_checkpoint
from marlin_moe.repack.ranks import ranks_from_environment

class Lost:
    def start(self, total_bytes):
        pass
    def advance(self, done_bytes, what):
        if os.environ["RANK"] == os.environ.get("LOST"):
            os.kill(os.getpid(), signal.SIGKILL)

with ranks_from_environment() as ranks:
    repack_checkpoint(sys.argv[1], sys.argv[2], ranks=ranks, workers=1, progress=Lost())
"""


def test_four_ranks_make_the_same_bytes_and_one_may_be_lost(
    single: tuple[Path, Path], tmp_path: Path
) -> None:
    source, packed = single[0], tmp_path / "packed"
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    lost = torchrun(str(script), str(source), str(packed), LOST="2")
    assert lost.returncode != 0
    assert f"exitcode  : -{signal.SIGKILL.value}" in lost.stderr, lost.stderr
    assert not (packed / MANIFEST).exists()
    before = {p.name: p.stat().st_ino for p in packed.iterdir() if p.is_file()}
    again = torchrun("-m", "marlin_moe.cli", "repack", str(source), str(packed), "--json")
    assert again.returncode == 0, again.stderr
    report = json.loads(again.stdout)
    assert (report["ranks"], report["resumed_files"]) == (4, len(before))
    assert all((packed / name).stat().st_ino == inode for name, inode in before.items())
    assert contents(packed) == contents(single[1])
    fresh = torchrun("-m", "marlin_moe.cli", "repack", str(source), str(tmp_path / "fresh"))
    assert fresh.returncode == 0, fresh.stderr
    assert contents(tmp_path / "fresh") == contents(single[1])
    assert fresh.stdout.count("layers,") == 1, "one rank reports"
    before = {p.name: (p.stat().st_ino, p.stat().st_mtime_ns) for p in packed.iterdir()}
    done = torchrun("-m", "marlin_moe.cli", "repack", str(source), str(packed))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("already complete") == 1
    assert {p.name: (p.stat().st_ino, p.stat().st_mtime_ns) for p in packed.iterdir()} == before


OTHERWISE = """
import os, sys
from marlin_moe import repack_checkpoint
from marlin_moe.repack.packed import durable
from marlin_moe.repack.ranks import ranks_from_environment

durable.LONGEST_DELAY_S = 1.0
source, folder, what = sys.argv[1:]
first = os.environ["RANK"] == "0"
with ranks_from_environment() as ranks:
    repack_checkpoint(
        source,
        folder + ("/packed-" + os.environ["RANK"] if what == "destination" else "/packed"),
        ranks=ranks,
        workers=1,
        allow_dead_experts=what == "options" and not first,
    )
"""


@pytest.mark.parametrize(
    ("what", "found"),
    [
        ("destination", "expected the run that rank 0 has begun there, got none on rank 1"),
        ("options", "rank 1 of 2: expected the options of rank 0, {'allow_dead_experts': False}"),
    ],
)
def test_ranks_that_do_not_work_on_the_same_are_refused_at_the_start(
    single: tuple[Path, Path], tmp_path: Path, what: str, found: str
) -> None:
    script = tmp_path / "rank.py"
    script.write_text(OTHERWISE)
    ranks = two_ranks(str(script), str(single[0]), str(tmp_path), what)
    assert [code for code, _ in ranks] == [1, 1], ranks
    assert all(found in err for _, err in ranks), ranks
    names = {path.name for path in tmp_path.rglob("*")} - {"packed-0", ".marlin_moe"}
    assert names <= {"rank.py", "run.json", "lock"}, names


def two_ranks(*arguments: str) -> list[tuple[int, str]]:
    """(exit code, stderr) of two processes without torchrun, which would stop one when the other ends."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    own = os.environ | {"PYTHONSAFEPATH": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, *arguments],
            env=own | {"MASTER_PORT": port, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    texts = [rank.communicate(timeout=120)[1] for rank in ranks]
    return [(rank.returncode, text) for rank, text in zip(ranks, texts, strict=True)]


def test_a_refused_source_ends_every_rank_with_the_reason(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "source", SPEC)
    (tmp_path / "source" / "model-00002-of-00003.safetensors").unlink()
    done = torchrun("-m", "marlin_moe.cli", "repack", str(tmp_path / "source"), str(tmp_path / "packed"))
    assert done.returncode != 0
    assert done.stderr.count("model-00002-of-00003.safetensors") >= 4
    assert not (tmp_path / "packed").exists()


def test_a_rank_of_an_earlier_run_that_is_alive_keeps_the_next_one_out(
    pair_of: Callable[[str], Any], tmp_path: Path
) -> None:
    import fcntl

    packed = tmp_path / "packed"
    (packed / ".marlin_moe").mkdir(parents=True)
    with (packed / ".marlin_moe" / "lock-3").open("w") as lock:
        lock.write("process 7 on elsewhere")
        lock.flush()
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(PackedError, match=r"lock-3: expected no other run .*process 7 on elsewhere"):
            repack_checkpoint(pair_of("plain").source, packed)
    repack_checkpoint(pair_of("plain").source, packed)
    assert contents(packed) == contents(pair_of("plain").packed)


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"WORLD_SIZE": "four"}, r"WORLD_SIZE: expected a number.*got 'four'"),
        ({"WORLD_SIZE": "2", "RANK": "0"}, r"WORLD_SIZE=2: .*got no MASTER_ADDR, MASTER_PORT"),
        (
            {"WORLD_SIZE": "2", "RANK": "5", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"},
            r"RANK=5: expected less than WORLD_SIZE=2",
        ),
    ],
)
def test_an_environment_that_describes_no_ranks(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], message: str
) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(MarlinMoEError, match=message), ranks_from_environment():
        pass


@pytest.mark.parametrize("workers", [0, -1])
def test_workers_below_one(pair_of: Callable[[str], Any], tmp_path: Path, workers: int) -> None:
    with pytest.raises(MarlinMoEError, match="workers: expected at least 1"):
        repack_checkpoint(pair_of("plain").source, tmp_path / "packed", workers=workers)
