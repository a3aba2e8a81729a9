"""CPU weight repacking in GB/s of packed words, beside `copy_` of the same bytes into a warm destination.

    python benchmarks/repack_cpu.py [--threads 1 --threads 2] [--repeats 7] [--problem NAME] [--json]

Every round runs every path with every number of threads, one after the other; figures are medians over the
rounds. Source and destination are larger than the caches. The first round is not counted, and compares the
bytes of all paths.
"""

import json
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import click
import torch

from marlin_moe.kernels.layout import pack_qweight
from marlin_moe.repack.native.path import load_extension
from marlin_moe.repack.native.repack_weights import qweight_shape, run_c_loop, run_torch

RESULTS = Path(__file__).parent / "results" / "repack_cpu.json"
ROOT = Path(__file__).parent.parent


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One matrix [E, N, K] of a layer's experts."""

    name: str
    num_experts: int
    n: int
    k: int
    bits: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """The median speed of one path; `of_copy` is its part of the speed of `copy_` with as many threads."""

    problem: str
    packed_bytes: int
    path: str
    threads: int
    gigabytes_per_s: float
    of_copy: float


# A layer of Qwen3-30B-A3B, eight experts of Kimi-K2.5; the group sizes (128 and 32) do not concern the words.
PROBLEMS = [
    Problem(name=f"{name} int{bits}", num_experts=num_experts, n=n, k=k, bits=bits)
    for bits in (4, 8)
    for name, num_experts, n, k in (
        ("qwen3-30b-a3b.w13", 128, 2 * 768, 2048),
        ("qwen3-30b-a3b.w2", 128, 2048, 768),
        ("kimi-k2.5.w13", 8, 2 * 2048, 7168),
        ("kimi-k2.5.w2", 8, 7168, 2048),
    )
]


def paths(
    weight_packed: torch.Tensor, out: torch.Tensor, bits: int
) -> Iterator[tuple[str, Callable[[], object]]]:
    """`copy_` first, then what fills `out` with Marlin words."""
    copied = out.view_as(weight_packed)
    yield "copy_", lambda: copied.copy_(weight_packed)
    extension = load_extension()
    if isinstance(extension, str):
        click.echo(f"No C loop: {extension}.", err=True)
    else:
        for variant in extension.variants():
            yield f"C {variant}", partial(run_c_loop, weight_packed, out, bits=bits, variant=variant)
    yield "torch", partial(run_torch, weight_packed, out, bits=bits)


def measure(problem: Problem, threads: tuple[int, ...], repeats: int) -> list[Measurement]:
    """Every path with every number of threads on one matrix of random words."""
    shape = (problem.num_experts, problem.n, problem.k * problem.bits // 32)
    weight_packed = torch.randint(-(2**31), 2**31, shape, dtype=torch.int32)
    out = torch.zeros(qweight_shape(weight_packed, bits=problem.bits), dtype=torch.int32)
    expected = pack_qweight(weight_packed, bits=problem.bits)
    seconds: dict[tuple[str, int], list[float]] = {}
    for repeat in range(repeats + 1):
        for count in threads:
            torch.set_num_threads(count)
            for path, run in paths(weight_packed, out, problem.bits):
                start = time.perf_counter()
                run()
                elapsed = time.perf_counter() - start
                if repeat:
                    seconds.setdefault((path, count), []).append(elapsed)
                elif path != "copy_" and not torch.equal(out, expected):
                    raise click.ClickException(f"{problem.name}: {path} gives other bytes than torch.")
    medians = {key: statistics.median(times) for key, times in seconds.items()}
    return [
        Measurement(
            problem=problem.name,
            packed_bytes=weight_packed.nbytes,
            path=path,
            threads=count,
            gigabytes_per_s=round(weight_packed.nbytes / median / 1e9, 2),
            of_copy=round(medians["copy_", count] / median, 3),
        )
        for (path, count), median in medians.items()
    ]


def machine() -> dict[str, str | int]:
    """What the figures depend on besides the problem."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=40"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False)
    return {
        "cpu": models[0] if models else platform.processor() or platform.machine(),
        "cpus": len(models) or 1,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "commit": commit.stdout.strip() or "none",
    }


@click.command(help=__doc__.partition("\n")[0])
@click.option("--threads", multiple=True, type=click.IntRange(min=1), default=(1, 2), show_default=True)
@click.option("--repeats", type=click.IntRange(min=1), default=7, show_default=True, help="Counted rounds.")
@click.option(
    "--problem", "part", default="", help="Only problems with this in their name, such as `kimi` or `int4`."
)
@click.option("--json", "as_json", is_flag=True, help=f"Also write {RESULTS.relative_to(ROOT)}.")
def main(threads: tuple[int, ...], repeats: int, part: str, as_json: bool) -> None:
    """Measure, print, and write the results."""
    measurements = []
    for problem in (problem for problem in PROBLEMS if part in problem.name):
        found = measure(problem, threads, repeats)
        click.echo(
            f"{problem.name}  {problem.num_experts} x {problem.n} x {problem.k}, "
            f"{found[0].packed_bytes / 1e6:.0f} MB"
        )
        for path in dict.fromkeys(entry.path for entry in found):
            speeds = [
                f"{entry.gigabytes_per_s:6.2f} GB/s = {entry.of_copy:.2f} of copy_ ({entry.threads} threads)"
                for entry in found
                if entry.path == path
            ]
            click.echo(f"  {path:<10}" + "   ".join(speeds))
        measurements += found
    if not measurements:
        raise click.UsageError(
            f"--problem: no name contains {part!r}: {', '.join(p.name for p in PROBLEMS)}."
        )
    if as_json:
        RESULTS.parent.mkdir(exist_ok=True)
        report = {
            "machine": machine(),
            "repeats": repeats,
            "measurements": [asdict(entry) for entry in measurements],
        }
        RESULTS.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
