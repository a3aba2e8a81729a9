"""Repacking and loading from disk, in GB/s of source bytes, beside `cp` and safetensors' own loader.

    python benchmarks/repack_disk.py FOLDER [--layers 48] [--workers N] [--repeats 3] [--json]

Makes a checkpoint in Qwen3-30B-A3B's shapes below FOLDER (0.35 GB a layer; three times that is needed) and
removes everything again. Every round runs every variant once, after a first round that is not counted: memory
that a virtual machine has not used yet is slow. What is written counts until it is on the disk (`sync`), and
is also given without. Loading counts until every byte of every tensor has been read (hashed), from a cold and
from a warm page cache. Each run has a process of its own, whose private memory (RssAnon) is watched; its
imports do not count.
"""

import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from repack_cpu import machine

from marlin_moe.bench.random_checkpoint import SHAPES, write_checkpoint

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "repack_disk.json"

REPACK = """
import sys, time
import compressed_tensors.quantization
from marlin_moe import repack_checkpoint
start = time.perf_counter()
report = repack_checkpoint(sys.argv[1], sys.argv[2], workers=int(sys.argv[3]) or None)
print(time.perf_counter() - start)
"""
TOUCH = """
import sys, time
import torch, xxhash
from pathlib import Path
from marlin_moe.repack import load
from marlin_moe.repack.packed.load import load_packed_layers
from marlin_moe.repack.tensor_file import tensor_bytes
from safetensors.torch import load_file

def read(tensors):
    return [xxhash.xxh3_64_hexdigest(tensor_bytes(t)) for t in tensors]

path, done = Path(sys.argv[1]), []
start = time.perf_counter()
"""
LOAD_LAYERS = (
    TOUCH
    + """
layers = load.load_layers(path)
loaded = time.perf_counter() - start
for layer in layers.values():
    done += read(t for _, t in layer.tensors())
print(time.perf_counter() - start, loaded, len(done))
"""
)
LOAD_FILE = (
    TOUCH
    + """
files = [load_file(file) for file in sorted(path.glob("experts-*.safetensors"))]
loaded = time.perf_counter() - start
for file in files:
    done += read(file.values())
print(time.perf_counter() - start, loaded, len(done))
"""
)
IN_MEMORY = """
import sys, time
import torch
from marlin_moe.repack.native.repack_weights import repack_weights
shapes = (128, 1536, 256), (128, 2048, 96)
parts = [torch.randint(-2**31, 2**31, shape, dtype=torch.int32) for shape in shapes]
outs = [repack_weights(part, bits=4) for part in parts]
times = []
for _ in range(9):
    start = time.perf_counter()
    for part, out in zip(parts, outs):
        repack_weights(part, bits=4, out=out)
    times.append(time.perf_counter() - start)
print(sum(part.nbytes for part in parts) / sorted(times)[4] / 1e9)
"""


def in_process(script: str, *arguments: str) -> tuple[list[float], int]:
    """(the numbers on the last line that a process prints, its peak of private memory in bytes)."""
    command = [sys.executable, "-c", script, *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        peak = 0
        while child.poll() is None:
            peak = max(peak, private_bytes(child.pid))
            time.sleep(0.01)
        printed = child.stdout.read() if child.stdout else ""
    if child.returncode:
        raise click.ClickException(f"{' '.join(arguments)}: the run failed")
    return [float(word) for word in printed.split("\n")[-2].split()], peak


def private_bytes(pid: int) -> int:
    """RssAnon of a process; 0 once it has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon")), 0)


def timed_sync() -> float:
    """Seconds until everything is on the disk."""
    start = time.perf_counter()
    os.sync()
    return time.perf_counter() - start


def evict(path: Path) -> None:
    """The files of a directory out of the page cache."""
    os.sync()
    for file in path.iterdir():
        with file.open("rb") as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def size_bytes(path: Path, pattern: str = "*") -> int:
    """Bytes of the files of a directory."""
    return sum(file.stat().st_size for file in path.glob(pattern))


def measure_copy(source: Path, folder: Path) -> dict[str, float]:
    """`cp -r`, with and without the sync."""
    target = folder / "copy"
    start = time.perf_counter()
    subprocess.run(["cp", "-r", str(source), str(target)], check=True)
    seconds = time.perf_counter() - start
    found = {"seconds": seconds, "with_sync_s": seconds + timed_sync()}
    shutil.rmtree(target)
    return found


def measure_repack(source: Path, packed: Path, workers: int) -> dict[str, float]:
    """A repack into a new directory; each of its files is on the disk when it gets its name."""
    shutil.rmtree(packed, ignore_errors=True)
    (seconds,), peak = in_process(REPACK, str(source), str(packed), str(workers))
    return {"seconds": seconds, "with_sync_s": seconds + timed_sync(), "peak_private_bytes": peak}


def measure_load(packed: Path, script: str, *, cold: bool) -> dict[str, float]:
    """Loading all experts and reading every byte of them."""
    if cold:
        evict(packed)
    (seconds, loaded, _), peak = in_process(script, str(packed))
    return {"seconds": seconds, "until_returned_s": loaded, "peak_private_bytes": peak}


def one_round(source: Path, packed: Path, workers: int) -> dict[str, dict[str, float]]:
    """Every variant once."""
    found = {
        "cp": measure_copy(source, source.parent),
        "repack": measure_repack(source, packed, workers),
    }
    for heat in ("cold", "warm"):
        for name, script in (("load_file", LOAD_FILE), ("load_layers", LOAD_LAYERS)):
            found[f"{name}, {heat}"] = measure_load(packed, script, cold=heat == "cold")
    return found


@click.command(help=__doc__.partition("\n")[0])
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False))
@click.option("--layers", type=click.IntRange(min=1), default=48, show_default=True)
@click.option("--workers", type=click.IntRange(min=0), default=0, help="0: one a core.")
@click.option("--repeats", type=click.IntRange(min=1), default=3, show_default=True, help="Counted rounds.")
@click.option("--json", "as_json", is_flag=True, help=f"Also write {RESULTS.name}.")
def main(folder: Path, layers: int, workers: int, repeats: int, as_json: bool) -> None:
    """Measure, print, and write the results."""
    source, packed = folder / "source", folder / "packed"
    write_checkpoint(source, replace(SHAPES["qwen3-30b-a3b"], packed_attention=False), layers)
    try:
        (in_memory,), _ = in_process(IN_MEMORY)
        rounds = [one_round(source, packed, workers) for _ in range(repeats + 1)][1:]
        sizes = {"source_bytes": size_bytes(source), "experts_bytes": size_bytes(packed, "experts-*")}
    finally:
        shutil.rmtree(source)
        shutil.rmtree(packed, ignore_errors=True)
    report: dict[str, Any] = {
        "machine": machine(),
        "layers": layers,
        "repeats": repeats,
        **sizes,
        "in_memory_gigabytes_per_s": round(in_memory, 2),
        "measurements": {
            name: summary(rounds, name, sizes["experts_bytes" if "load" in name else "source_bytes"])
            for name in rounds[0]
        },
    }
    click.echo(json.dumps(report, indent=1))
    if as_json:
        RESULTS.parent.mkdir(exist_ok=True)
        RESULTS.write_text(json.dumps(report, indent=1) + "\n")


def summary(rounds: list[dict[str, dict[str, float]]], name: str, nbytes: int) -> dict[str, float]:
    """Medians over the rounds, the highest peak, and the speeds that follow."""
    found = [each[name] for each in rounds]
    out = {
        key: round(
            max(f[key] for f in found) if "peak" in key else statistics.median(f[key] for f in found), 3
        )
        for key in found[0]
    }
    out["gigabytes_per_s"] = round(nbytes / out["seconds"] / 1e9, 3)
    if "with_sync_s" in out:
        out["gigabytes_per_s_with_sync"] = round(nbytes / out["with_sync_s"] / 1e9, 3)
    return out


if __name__ == "__main__":
    main()
