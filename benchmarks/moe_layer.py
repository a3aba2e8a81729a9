"""A whole MoE layer: our op beside vLLM's Marlin kernels and Humming, against the limit of the machine.

    python benchmarks/moe_layer.py --all --check --warm             # what the README shows
    python benchmarks/moe_layer.py --all --missing --time-limit 400 # what the file has not, as far as it goes
    python benchmarks/moe_layer.py --check                          # decode: five shapes, M = 1 ... 128
    python benchmarks/moe_layer.py --quick --shapes qwen3 --impl ours --append

Routing is given (ids and weights of the top k); the layer is alignment, GEMM 1, SiLU and product, GEMM 2 and
the weighted sum, in bf16. Weights are random words, the same for all implementations. Times are medians of
CUDA-graph replays over several layers, so that weights come from memory: `burst` after rest, all
implementations in turn, and `sustained` under load, when the power limit lowers the clock. `eager` is the
host's time of a pass without a graph. The floor is the bytes of the active experts and tokens over the
bandwidth, or the operations over the bf16 matmul rate, whichever is longer, both measured in the same run.
An implementation that fails at a point costs its own figures only. Results are written after every point, and
at the end compared with the figures asked for. README.md beside this says where the peers come from.
"""

import shutil
import subprocess
import sys
import time
import warnings
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import click
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))  # PYTHONSAFEPATH leaves it out

from layer_bench import MAKERS, Bench, Run, free_memory
from layer_options import containing, formats_of, names_of, numbers
from layer_problems import DECODE_TOKENS, FORMATS, FULL_SWEEP, SHAPES, Case
from layer_report import report_lines
from layer_table import ceilings_line, header_line, point_lines, quoted_us
from layer_timing import Protocol, TimeLimit, measure_ceilings
from warm_peers import PEERS, warm_all

from marlin_moe.cli.bench_results import Point, Results

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "moe_layer.json"
WRONG = 1e-2  # relative error; bf16 gives a few times 1e-3
QUICK = (1, 8, 64)


def machine(commit: str | None) -> dict[str, str]:
    """What the figures depend on besides the problem."""
    git = ("git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=40")
    driver = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return {
        "device": torch.cuda.get_device_name(),
        "driver": said_by(*driver),
        "torch": str(torch.__version__),
        "cuda": str(torch.version.cuda),
        "marlin_moe": version("marlin-moe"),
        "commit": commit or said_by(*git),
    }


def said_by(*command: str) -> str:
    """The first line that a program prints; `unknown` where there is none."""
    if shutil.which(command[0]) is None:
        return "unknown"
    said = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    return said.splitlines()[0] if said else "unknown"


@click.command(help=__doc__.partition("\n")[0])
@click.option("--shapes", default=",".join(SHAPES), callback=containing, help="Parts of names, with commas.")
@click.option(
    "--formats",
    callback=formats_of,
    help=f"Some of {', '.join(FORMATS)}; int4 by default.",
)
@click.option("--tokens", callback=numbers, help="Numbers of tokens; 1, 2, 4 ... 128 by default.")
@click.option(
    "--all",
    "full_sweep",
    is_flag=True,
    help="int4 at 1, 2, 4 ... 8192 tokens; then the other formats at 1, 8, 32, 128, at two of the shapes.",
)
@click.option(
    "--impl",
    default="ours,vllm,humming",
    show_default=True,
    callback=lambda context, parameter, value: names_of(list(MAKERS), value),
    help=f"Some of {', '.join(MAKERS)}; the others are compared with the first.",
)
@click.option(
    "--eager", default="1", show_default=True, callback=numbers, help="Tokens also without a graph."
)
@click.option("--layers", type=click.IntRange(min=1), help="Layers in one graph; by their bytes by default.")
@click.option("--check", is_flag=True, help="Compare with float64 on some rows, and with each other.")
@click.option("--warm", is_flag=True, help="First compile what peers compile on first use, in parallel.")
@click.option("--quick", is_flag=True, help="Fewer samples; M = 1, 8, 64 unless --tokens says otherwise.")
@click.option("--out", type=click.Path(path_type=Path), default=RESULTS, help="The JSON file.")
@click.option("--append", is_flag=True, help="Points join those of the file, or take their places.")
@click.option(
    "--missing", is_flag=True, help="Only points that the file has not for each of --impl; they join."
)
@click.option("--time-limit", type=float, help="No point begins that would not end within so many seconds.")
@click.option("--patience", default=300.0, show_default=True, help="A step of more seconds ends the run.")
@click.option("--commit", help="What was measured, where git cannot say.")
@torch.no_grad()
def main(
    impl: tuple[str, ...],
    out: Path,
    append: bool,
    missing: bool,
    time_limit: float | None,
    commit: str | None,
    **options: Any,
) -> None:
    """Measure, print and write, point after point."""
    limit = TimeLimit(time_limit)
    cases = cases_of(options)
    earlier = Results.read(out) if (append or missing) and out.exists() else None
    if missing and earlier is not None:
        cases = missing_cases(cases, earlier, impl)
    torch.manual_seed(0)
    warnings.filterwarnings("ignore", message=".*deterministic.*")
    if options["warm"]:
        peers = [name for name in impl if name in PEERS]
        for line in warm_all(peers, cases, limit_s=limit.left_s):
            click.echo(f"# compiled for {line}")
    protocol = Protocol(samples=5, rest_ms=2.0, eager_samples=15) if options["quick"] else Protocol()
    run = Run(
        names=impl,
        eager_tokens=options["eager"],
        layers=options["layers"],
        check=options["check"],
        patience_s=options["patience"],
        protocol=protocol,
        ceilings=measure_ceilings(),
    )
    results = Results(machine=machine(commit), protocol=asdict(protocol), ceilings=asdict(run.ceilings))
    click.echo(ceilings_line(results.machine, run.ceilings))
    if earlier is not None:
        results = results.joined(earlier)
    try:
        measured = measure_cases(run, cases, results, out, limit)
    finally:  # also where the device was lost
        click.echo("\n".join(report_lines(results.points)))
    wrong = wrong_results(results, measured)
    if wrong:
        raise click.ClickException("\n".join(wrong))


def cases_of(options: Mapping[str, Any]) -> list[Case]:
    """The cases that --shapes, --formats and --tokens, or --all, ask for.

    Raises:
        click.UsageError: --all with --formats or --tokens, which it says itself.
    """
    shapes, formats, tokens = options["shapes"], options["formats"], options["tokens"]
    if not options["full_sweep"]:
        counts = tokens or (QUICK if options["quick"] else DECODE_TOKENS)
        return [
            Case(shape=SHAPES[shape], form=FORMATS[form], tokens=counts)
            for shape in shapes
            for form in formats or ("int4",)
        ]
    if formats or tokens:
        raise click.UsageError("--all: expected no --formats and no --tokens, because it says both, got one.")
    return [case for case in FULL_SWEEP if case.shape.name in shapes]


def missing_cases(cases: Sequence[Case], earlier: Results, names: Sequence[str]) -> list[Case]:
    """The cases without the numbers of tokens at which all of `names` were measured or refused."""
    done = {point.key for point in earlier.points if point.measured.keys() >= set(names)}
    left = [
        replace(
            case,
            tokens=tuple(t for t in case.tokens if (case.shape.name, case.form.name, t) not in done),
        )
        for case in cases
    ]
    return [case for case in left if case.tokens]


def measure_cases(
    run: Run, cases: Sequence[Case], results: Results, out: Path, limit: TimeLimit
) -> set[tuple[str, str, int]]:
    """A table for each case, as far as time goes; the points join the results. Returns their keys."""
    asked = sum(len(case.tokens) for case in cases)
    measured: set[tuple[str, str, int]] = set()
    quoted = quoted_us()
    making_s = 0.0
    for case in cases:
        if not limit.allows(making_s):
            break
        start = time.perf_counter()
        bench = Bench.build(run, case)
        making_s = time.perf_counter() - start
        click.echo(
            f"\n{case.shape.name} {case.form.name}: us a layer in burst, {len(bench.layers)} layers "
            f"(made in {making_s:.1f} s)"
        )
        click.echo(header_line(run.names))
        for point in points_in_time(bench, case.tokens, limit):
            results.add(point)
            results.write(out)
            measured.add(point.key)
            click.echo("\n".join(point_lines(point, run.names, quoted)))
        del bench
        free_memory(run.device)
    left = "" if len(measured) == asked else "; --missing measures the others"
    click.echo(f"\n# {len(measured)} of {asked} points in {limit.spent_s:.0f} s{left}")
    return measured


def points_in_time(bench: Bench, tokens: Sequence[int], limit: TimeLimit) -> Iterator[Point]:
    """A point for each number of tokens, on layers that all of them share, as far as time goes.

    A point is expected to take as long a token as the one before, which is more than it does.
    """
    token_s = 0.0
    for count in tokens:
        if not limit.allows(token_s * count):
            return
        start = time.perf_counter()
        point = bench.point(count)
        token_s = (time.perf_counter() - start) / count
        yield point


def wrong_results(results: Results, measured: Container[tuple[str, str, int]]) -> list[str]:
    """A line for every result of these points that is not the layer's."""
    return [
        f"{point.shape} {point.format} M={point.tokens}: {name} is off by {found.relative_error:.1e}"
        for point in results.points
        if point.key in measured
        for name, found in point.measured.items()
        if found.relative_error is not None and not found.relative_error < WRONG
    ]


if __name__ == "__main__":
    main()
