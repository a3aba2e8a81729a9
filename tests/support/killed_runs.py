"""Repacks killed at random instants, and pairs of repacks at once; a script that prints counts as JSON.

    python killed_runs.py SOURCE FOLDER KILLS PAIRS SEED

Each run is a forked process: an interpreter that has everything imported costs a hundredth of a new one.
Nothing here runs an operation of torch before it forks, so no thread is lost.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
import warnings
from collections import Counter
from pathlib import Path

import compressed_tensors.quantization  # noqa: F401 - before the first fork, not in every run
import torch

from marlin_moe import MarlinMoEError, repack_checkpoint
from marlin_moe.repack.packed.reader import PackedCheckpoint
from packed_files import MANIFEST, contents

WORK = ".marlin_moe"


def fork_run(source: Path, packed: Path, workers: int) -> int:
    """The process of a run that blocks of one expert make long; it exits with 0, or with 3 when refused."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        torch.set_num_threads(1)
        repack_checkpoint(source, packed, workers=workers, block_bytes=1)
        code = 0
    except MarlinMoEError as error:
        code = 3
        (packed.parent / f"{packed.name}.error").write_text(str(error))
    finally:
        os._exit(code)


def wait(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def finished(packed: Path) -> dict[str, tuple[int, int]]:
    """Files with their final names -> inode and time of the last change."""
    files = [p for p in packed.rglob("*") if p.is_file() and WORK not in p.relative_to(packed).parts]
    return {p.name: (p.stat().st_ino, p.stat().st_mtime_ns) for p in files}


def is_complete(packed: Path) -> bool:
    """Whether it opens as a packed checkpoint."""
    try:
        PackedCheckpoint(packed).close()
    except MarlinMoEError:
        return False
    return True


def run_until_done(
    source: Path,
    packed: Path,
    expected: dict[str, bytes],
    longest: float,
    counts: Counter[str],
    chance: random.Random,
) -> None:
    """One checkpoint: killed up to three times, then left alone."""
    for attempt in range(4):
        before = finished(packed) if packed.exists() else {}
        pid = fork_run(source, packed, workers=chance.choice([1, 2, 3]))
        if attempt < 3:
            time.sleep(chance.random() * longest)
            os.kill(pid, signal.SIGKILL)
        code = wait(pid)
        after = finished(packed) if packed.exists() else {}
        for name, place in before.items():
            counts["redone"] += after.get(name) != place
            counts[f"redone {name}"] += after.get(name) != place
        counts["kept"] += len(before)
        if code == 0:
            break
        if code != -signal.SIGKILL:
            raise AssertionError(f"{packed}: ended with {code}, {packed.name}.error may say why")
        counts["killed"] += 1
        counts["killed_with_files"] += bool(after)
        whole = {name: data for name, data in contents(packed).items() if not name.startswith(WORK)}
        counts["not_whole"] += sum(expected[name] != data for name, data in whole.items())
        if is_complete(packed):  # killed while it removed its folder, or after
            counts["falsely_finished"] += whole != expected
            if not (packed / WORK).exists():
                break
    counts["lost"] += contents(packed) != expected
    counts["checkpoints"] += 1


def run_pair(source: Path, packed: Path, expected: dict[str, bytes], counts: Counter[str]) -> None:
    """Two runs on one destination at once: one makes it, the other is refused."""
    codes = sorted(wait(pid) for pid in [fork_run(source, packed, workers=2) for _ in range(2)])
    counts["pairs"] += 1
    counts["pairs_one_refused"] += codes == [0, 3]
    counts["lost"] += contents(packed) != expected


def main(source: Path, folder: Path, kills: int, pairs: int, seed: int) -> None:
    warnings.simplefilter("error")
    chance, counts = random.Random(seed), Counter[str]()
    start = time.perf_counter()
    if wait(fork_run(source, folder / "expected", workers=1)):
        raise AssertionError((folder / "expected.error").read_text())
    longest = 1.1 * (time.perf_counter() - start)
    expected = contents(folder / "expected")
    while counts["killed"] < kills:
        packed = folder / f"killed-{counts['checkpoints']}"
        run_until_done(source, packed, expected, longest, counts, chance)
    for number in range(pairs):
        run_pair(source, folder / f"pair-{number}", expected, counts)
    print(json.dumps(+counts | {"longest_s": longest, MANIFEST: len(expected)}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), *map(int, sys.argv[3:6]))
