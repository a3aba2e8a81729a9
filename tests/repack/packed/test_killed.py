"""Runs killed at random instants, two at once, on a full disk: nothing lost, nothing falsely finished."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from checkpoints import CheckpointSpec, write_checkpoint
from packed_files import MANIFEST, contents

SUPPORT = Path(__file__).parents[2] / "support"
SPEC = CheckpointSpec(num_layers=4, num_experts=4, shards=3)


def test_runs_killed_at_random_instants_resume_to_the_same_bytes(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "source", SPEC)
    script = SUPPORT / "killed_runs.py"
    command = [sys.executable, str(script), str(tmp_path / "source"), str(tmp_path), "80", "8", "20"]
    environment = os.environ | {"PYTHONSAFEPATH": "1", "PYTHONPATH": str(SUPPORT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    counts = json.loads(done.stdout)
    print(counts)
    assert counts["killed"] >= 80, counts
    assert counts["killed_with_files"] >= 20, f"hardly a run was killed halfway: {counts}"
    assert counts["kept"] > 50, f"hardly a file was there to be kept: {counts}"
    nothing = ("redone", "not_whole", "falsely_finished", "lost")
    assert {name: counts.get(name, 0) for name in nothing} == dict.fromkeys(nothing, 0), counts
    assert counts["pairs"] == counts["pairs_one_refused"] == 8, counts


FULL_DISK = """
import errno, subprocess, sys, warnings
from pathlib import Path
from marlin_moe import MarlinMoEError, repack_checkpoint
source, disk, expected = sys.argv[1], Path(sys.argv[2]), sys.argv[3]

def mount(*arguments):
    subprocess.run(["mount", *arguments, str(disk)], check=True)

mount("-t", "tmpfs", "-o", "size=64k", "tmpfs")
failures, kept, size = 0, 0, 64
while True:
    try:
        report = repack_checkpoint(source, disk / "packed", workers=1)
        break
    except MarlinMoEError as error:
        assert "ENOSPC" in str(error) and "goes on where it stopped" in str(error), error
        assert not (disk / "packed" / "marlin_moe.json").exists()
        assert not list((disk / "packed").glob(".marlin_moe/*.partial"))
        failures += 1
    size += 128
    mount("-o", f"remount,size={size}k")
print("failures", failures, "resumed", report.resumed_files)
assert subprocess.run(["diff", "-r", str(disk / "packed"), expected]).returncode == 0
mount("-o", "remount,ro")
try:
    repack_checkpoint(source, disk / "other")
except MarlinMoEError as error:
    assert "EROFS" in str(error), error
    print("read-only refused")
"""


@pytest.mark.skipif(
    subprocess.run(["unshare", "-rm", "true"], capture_output=True, check=False).returncode != 0,
    reason="needs the right to mount in a namespace of its own",
)
def test_a_disk_that_is_full_again_and_again(pair_of: Callable[[str], Any], tmp_path: Path) -> None:
    pair = pair_of("plain")
    (tmp_path / "disk").mkdir()
    command = ["unshare", "-rm", sys.executable, "-c", FULL_DISK, str(pair.source), str(tmp_path / "disk")]
    done = subprocess.run(
        [*command, str(pair.packed)], capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr + done.stdout
    failures, resumed = (int(word) for word in done.stdout.split()[1:4:2])
    assert failures >= 3
    assert resumed >= 1
    assert "read-only refused" in done.stdout


LIMITED = """
import resource, sys
from marlin_moe import MarlinMoEError, repack_checkpoint
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
try:
    repack_checkpoint(sys.argv[1], sys.argv[2])
except MarlinMoEError as error:
    assert "EFBIG" in str(error), error
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    repack_checkpoint(sys.argv[1], sys.argv[2])
    print("resumed")
"""


@pytest.mark.skipif(
    resource.getrlimit(resource.RLIMIT_FSIZE)[1] != resource.RLIM_INFINITY, reason="files are limited here"
)
def test_a_limit_of_a_files_size(pair_of: Callable[[str], Any], tmp_path: Path) -> None:
    pair, packed = pair_of("plain"), tmp_path / "packed"
    command = [sys.executable, "-c", LIMITED, str(pair.source), str(packed)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.stdout == "resumed\n", done.stderr
    assert contents(packed) == contents(pair.packed)
    assert (packed / MANIFEST).exists()
