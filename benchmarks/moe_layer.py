"""A whole MoE layer: our op beside vLLM's Marlin kernels and Humming, against the limit of the machine.

    python benchmarks/moe_layer.py --check                          # decode: five shapes, M = 1 ... 128
    python benchmarks/moe_layer.py --tokens 256,512,1024,2048,4096,8192
    python benchmarks/moe_layer.py --quick --shapes qwen3 --impl ours

Routing is given (ids and weights of the top k); the layer is alignment, GEMM 1, SiLU and product, GEMM 2 and
the weighted sum, in bf16. Weights are random words, the same for all implementations. Times are medians of
CUDA-graph replays over several layers, so that weights come from memory: `burst` after rest, all
implementations in turn, and `sustained` under load, when the power limit lowers the clock. `eager` is the
host's time of a pass without a graph. The floor is the bytes of the active experts and tokens over the
bandwidth, or the operations over the bf16 matmul rate, whichever is longer, both measured in the same run.
Results are written after every point. README.md beside this says where the peers come from.
"""

import gc
import shutil
import subprocess
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

import click
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))  # PYTHONSAFEPATH leaves it out

from layer_bench import MAKERS, Bench, Run
from layer_problems import FORMATS, SHAPES, LayerShape, WeightFormat
from layer_table import ceilings_line, header_line, point_lines, quoted_us
from layer_timing import Protocol, measure_ceilings
from warm_peers import PEERS, warm_all

from marlin_moe.cli.bench_results import Results

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "moe_layer.json"
WRONG = 1e-2  # relative error; bf16 gives a few times 1e-3
DECODE = (1, 2, 4, 8, 16, 32, 64, 128)
QUICK = (1, 8, 64)


def containing(context: click.Context, parameter: click.Parameter, value: str) -> tuple[str, ...]:
    """The shapes whose name contains one of the parts in `kimi,qwen3`."""
    parts = [part.strip() for part in value.split(",")]
    for part in parts:
        if not part or not any(part in name for name in SHAPES):
            raise click.BadParameter(f"expected parts of {', '.join(SHAPES)}, got {part!r}")
    return tuple(name for name in SHAPES if any(part in name for part in parts))


def names_of(known: Sequence[str], value: str) -> tuple[str, ...]:
    """The names in `a,b`, each of them known."""
    names = tuple(dict.fromkeys(part.strip() for part in value.split(",")))
    for name in names:
        if name not in known:
            raise click.BadParameter(f"expected some of {', '.join(known)}, got {name!r}")
    return names


def numbers(context: click.Context, parameter: click.Parameter, value: str | None) -> tuple[int, ...]:
    """The numbers in `1,2,4`; none where there is no value."""
    try:
        found = tuple(int(part) for part in (value or "").split(",") if part.strip())
    except ValueError as error:
        raise click.BadParameter(f"expected numbers with commas, got {value!r}") from error
    if any(number < 1 for number in found):
        raise click.BadParameter(f"expected numbers from 1 on, got {value!r}")
    return found


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
    default="int4",
    show_default=True,
    callback=lambda context, parameter, value: names_of(list(FORMATS), value),
    help=f"Some of {', '.join(FORMATS)}.",
)
@click.option("--tokens", callback=numbers, help="Numbers of tokens; 1, 2, 4 ... 128 by default.")
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
@click.option("--patience", default=300.0, show_default=True, help="A step of more seconds ends the run.")
@click.option("--commit", help="What was measured, where git cannot say.")
def main(
    shapes: tuple[str, ...],
    formats: tuple[str, ...],
    tokens: tuple[int, ...],
    impl: tuple[str, ...],
    eager: tuple[int, ...],
    layers: int | None,
    check: bool,
    warm: bool,
    quick: bool,
    out: Path,
    patience: float,
    commit: str | None,
) -> None:
    """Measure, print and write, point after point."""
    torch.manual_seed(0)
    torch.set_grad_enabled(False)
    warnings.filterwarnings("ignore", message=".*deterministic.*")
    counts = tokens or (QUICK if quick else DECODE)
    if warm:
        for line in warm_all([name for name in impl if name in PEERS], shapes, formats, counts):
            click.echo(f"# compiled for {line}")
    protocol = Protocol(samples=5, rest_ms=2.0, eager_samples=15) if quick else Protocol()
    run = Run(
        names=impl,
        tokens=counts,
        eager_tokens=eager,
        layers=layers,
        check=check,
        patience_s=patience,
        protocol=protocol,
        ceilings=measure_ceilings(),
    )
    results = Results(machine=machine(commit), protocol=asdict(protocol), ceilings=asdict(run.ceilings))
    click.echo(ceilings_line(results.machine, run.ceilings))
    for shape in shapes:
        for form in formats:
            measure_shape(run, SHAPES[shape], FORMATS[form], results, out)
    wrong = wrong_results(results)
    if wrong:
        raise click.ClickException("\n".join(wrong))


def measure_shape(run: Run, shape: LayerShape, form: WeightFormat, results: Results, out: Path) -> None:
    """One table; its points join the results."""
    start = time.perf_counter()
    bench = Bench.build(run, shape, form)
    click.echo(
        f"\n{shape.name} {form.name}: us a layer in burst, {len(bench.layers)} layers "
        f"(made in {time.perf_counter() - start:.1f} s)"
    )
    click.echo(header_line(run.names))
    quoted = quoted_us()
    for tokens in run.tokens:
        point = bench.point(tokens)
        results.points.append(point)
        results.write(out)
        click.echo("\n".join(point_lines(point, run.names, quoted)))
    del bench
    gc.collect()
    if run.device == "cuda":
        torch.cuda.empty_cache()


def wrong_results(results: Results) -> list[str]:
    """A line for every result that is not the layer's."""
    return [
        f"{point.shape} {point.format} M={point.tokens}: {name} is off by {found.relative_error:.1e}"
        for point in results.points
        for name, found in point.measured.items()
        if found.relative_error is not None and not found.relative_error < WRONG
    ]


if __name__ == "__main__":
    main()
