"""What repacking and loading hold in memory and read from the files: bounded, whatever the size."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from checkpoint_spec import CheckpointSpec
from checkpoints import write_checkpoint
from marlin_moe import Shard, load_layers, repack_checkpoint
from marlin_moe.repack.tensor_file import TensorFile
from repeated import write_repeated

MIB = 1 << 20
SMALL = CheckpointSpec(num_experts=1, hidden_size=64, intermediate_size=64, top_k=1, extras=())
MEASURE = """
import ctypes, gc, json, sys
from pathlib import Path
from marlin_moe import repack_checkpoint, verify_checkpoint

def status(key):
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(key + ":"))

class Layers:  # private memory whenever another file is begun
    def __init__(self):
        self.seen = {}
    def start(self, total_bytes):
        pass
    def advance(self, done_bytes, what):
        if what not in self.seen:
            self.seen[what] = status("RssAnon")

workers, block_bytes = int(sys.argv[1]), int(sys.argv[2])
options = {"workers": workers, "block_bytes": block_bytes}
for path in map(Path, sys.argv[3:]):
    packed, watch = path.with_suffix(".packed"), Layers()
    found = {}
    for name, run in (
        ("repack", lambda: repack_checkpoint(path, packed, progress=watch, **options)),
        ("verify", lambda: verify_checkpoint(packed, path, **options)),
    ):
        gc.collect()
        if hasattr(ctypes.CDLL(None), "malloc_trim"):
            ctypes.CDLL(None).malloc_trim(0)
        before = status("RssAnon")
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts anew
        run()
        found[name] = status("VmHWM") - status("RssFile") - before
    print(json.dumps(found | {"layers": [size for name, size in watch.seen.items() if "experts" in name]}))
"""

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="memory is measured by /proc of Linux"
)


def measured(workers: int, block_bytes: int, *paths: Path) -> list[dict[str, Any]]:
    """Peaks of private memory beyond what was there before, of one process that repacks and verifies all."""
    command = [sys.executable, "-c", MEASURE, str(workers), str(block_bytes), *map(str, paths)]
    environment = os.environ | {"PYTHONSAFEPATH": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("workers", [1, 2])
def test_peaks_do_not_grow_with_the_layer(tmp_path: Path, workers: int) -> None:
    """Layers of 24 and of 96 MB in blocks of 4 MiB: a quarter of the larger one would be seen.

    Two workers have a block and its result each in memory at once, or not, as it happens: up to 12 MB more.
    """
    write_repeated(tmp_path / "first", SMALL, num_experts=2)
    spec = replace(SMALL, hidden_size=1024, intermediate_size=1024)
    layers = 2
    for name, experts in (("short", 16), ("long", 64)):
        per_expert = write_repeated(tmp_path / name, spec, num_experts=experts, num_layers=layers)
    names = [tmp_path / name for name in ("first", "short", "long")]
    _, short, long = measured(workers, 4 * MIB, *names)
    told = f"{workers} workers: short {short}, long {long}, an expert {per_expert}"
    for run in ("repack", "verify"):
        assert long[run] < 24 * MIB, told
        assert long[run] - short[run] < 16 * MIB, told


def test_nothing_grows_over_a_hundred_layers(tmp_path: Path) -> None:
    """Layers of 1.2 MB: were one kept, or its block, the last would find 90 of them."""
    write_repeated(tmp_path / "first", SMALL, num_experts=2)
    spec = replace(SMALL, hidden_size=256, intermediate_size=256)
    write_repeated(tmp_path / "many", spec, num_experts=12, num_layers=100)
    _, many = measured(1, 4 * MIB, tmp_path / "first", tmp_path / "many")
    sizes = many["layers"]
    assert len(sizes) == 100
    assert max(sizes[50:]) - max(sizes[10:20]) < 2 * MIB, [size // 1024 for size in sizes]
    assert many["repack"] < 24 * MIB, many["repack"]


def bytes_read(
    monkeypatch: pytest.MonkeyPatch, run: Callable[[], object]
) -> dict[str, list[tuple[int, int]]]:
    """File name -> (offset, bytes) of every read of tensors while `run` runs."""
    reads: dict[str, list[tuple[int, int]]] = {}
    read = os.preadv

    def preadv(fd: int, buffers: Any, offset: int, flags: int = 0) -> int:
        count = read(fd, buffers, offset, flags)
        if flags:  # whether a page is in memory: no read of tensors
            return count
        reads.setdefault(os.readlink(f"/proc/self/fd/{fd}"), []).append((offset, count))
        return count

    with monkeypatch.context() as patched:
        patched.setattr(os, "preadv", preadv)
        patched.setattr(os, "copy_file_range", lambda *_: 0)  # then carried tensors are read too
        run()
    return reads


def test_repacking_reads_every_byte_once_and_a_block_front_to_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_checkpoint(tmp_path / "source", CheckpointSpec(num_layers=2, shards=2))
    reads = bytes_read(
        monkeypatch, lambda: repack_checkpoint(tmp_path / "source", tmp_path / "packed", workers=1)
    )
    for path in sorted((tmp_path / "source").glob("*.safetensors")):
        with TensorFile(path) as file:
            shapes = {e.offset_bytes for e in file.entries.values() if e.name.endswith("weight_shape")}
            data = [(o, n) for o, n in reads[str(path)] if o >= file.header_bytes and o not in shapes]
            wanted = sum(e.nbytes for e in file.entries.values() if not e.name.endswith("weight_shape"))
        assert sum(count for _, count in data) == wanted
        steps = sorted(data)
        assert all(a + n <= b for (a, n), (b, _) in pairwise(steps)), "read twice"
        backwards = sum(b < a for (a, _), (b, _) in pairwise(data))
        assert backwards <= 3, f"{path.name}: {backwards} steps back for 2 layers and what is carried"


def test_an_ep_rank_reads_its_experts_alone(
    pair_of: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With TP, so that tensors are read and not mapped: half of w2 of a quarter of the experts."""
    packed = pair_of("plain").packed
    ((name, layer),) = load_layers(packed, only=["model.layers.0.mlp.experts"]).items()
    found: dict[str, Any] = {}
    reads = bytes_read(
        monkeypatch,
        lambda: found.update(load_layers(packed, tp=Shard(1, 2), ep=Shard(1, 4), only=[name])),
    )
    (file,) = (path for path in reads if path.endswith("experts-0.safetensors"))
    with TensorFile(Path(file)) as opened:
        w2 = opened.entries[f"{name}.w2.qweight"]
        inside = [(o, n) for o, n in reads[file] if w2.offset_bytes <= o < w2.offset_bytes + w2.nbytes]
        scales = [e for e in opened.entries.values() if e.name.endswith("scales")]
        others = sum(n for o, n in reads[file] if o >= opened.header_bytes) - sum(n for _, n in inside)
    assert sum(n for _, n in inside) == found[name].w2.qweight.nbytes == w2.nbytes // 8
    assert others == sum(entry.nbytes for entry in scales) // 4, "scales of this rank's experts"
    assert layer.num_experts == 4 * found[name].num_experts
