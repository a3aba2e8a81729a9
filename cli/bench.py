"""`marlin-moe bench model [PATH]`, `marlin-moe bench plot RESULT.json…`."""

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from .options import OutputFile, json_option, usable_device
from .output import counted, print_json
from .report import ended_in_order

if TYPE_CHECKING:
    import torch

SUFFIXES = (".svg", ".png")
VARIANTS = ("persistent", "per-call", "reference", "dequantized")
SHAPES = ("qwen3-30b-a3b", "small")
RANDOM_MODEL = ("shape", "layers", "folder")
"""Options of the model that is written where there is no PATH."""


def counts(context: click.Context, parameter: click.Parameter, value: str) -> tuple[int, ...]:
    """Positive whole numbers between commas, ascending, each once.

    Raises:
        click.BadParameter: anything else.
    """
    words = [word.strip() for word in value.split(",")]
    if not all(word.isdecimal() and int(word) > 0 for word in words):
        raise click.BadParameter(f"expected whole numbers from 1 on, between commas, got {value!r}.")
    return tuple(sorted({int(word) for word in words}))


@click.group()
def bench() -> None:
    """Measure a whole model, or draw what layer benchmarks found."""


@bench.command()
@click.argument("path", metavar="[PATH]", required=False)
@click.option(
    "--shape", type=click.Choice(SHAPES), default=SHAPES[0], show_default=True, help="Without PATH."
)
@click.option(
    "--layers", type=click.IntRange(min=1), help="Of the random model; all of the shape's by default."
)
@click.option(
    "--folder",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="Where the random model is written, and removed from; the system's temporary folder by default.",
)
@click.option(
    "--device", default="cuda", show_default=True, callback=usable_device, help="cpu, cuda, cuda:1."
)
@click.option(
    "--dtype", type=click.Choice(["bfloat16", "float16", "float32"]), help="The config's by default."
)
@click.option("--prompts", default="128,2048,8192", show_default=True, callback=counts, metavar="TOKENS,…")
@click.option("--batches", default="1,8,32", show_default=True, callback=counts, metavar="SEQUENCES,…")
@click.option(
    "--context", type=click.IntRange(min=1), default=128, show_default=True, help="Of each sequence."
)
@click.option("--steps", type=click.IntRange(min=2), default=32, show_default=True, help="Tokens decoded.")
@click.option("--repeats", type=click.IntRange(min=1), default=3, show_default=True, help="Runs of a prompt.")
@click.option(
    "--max-tokens", type=click.IntRange(min=1), default=8192, show_default=True, help="Of one pass."
)
@click.option(
    "--time-limit",
    type=click.FloatRange(min=0, min_open=True),
    default=math.inf,
    metavar="SECONDS",
    help="From loading on; what would begin later is left out.",
)
@click.option(
    "--variant",
    "variants",
    type=click.Choice(VARIANTS),
    multiple=True,
    help="Can be repeated; all by default.",
)
@click.option("-o", "--output", type=OutputFile(), help="Also write the results as JSON.")
@click.option("--plot", "picture", type=OutputFile(SUFFIXES), help="Also draw them: .svg or .png.")
@json_option
def model(
    path: str | None,
    shape: str,
    layers: int | None,
    folder: Path | None,
    device: "torch.device",
    dtype: str | None,
    output: Path | None,
    picture: Path | None,
    as_json: bool,
    **measured: Any,
) -> None:
    """Time to first token and time per token of a model in transformers.

    PATH is a checkpoint, packed or not; without one a model with random weights is written (17 GB in
    Qwen3-30B-A3B's shapes), measured and removed. Variants share the loaded model: `persistent` is load_model
    as it is, `per-call` allocates and zeroes a workspace in every call, `reference` takes small sizes,
    `dequantized` has the experts as plain weights, run by transformers, where they fit.

    \b
    Example:
      marlin-moe bench model --device cpu --shape small --prompts 8,64 --plot model.svg
    """
    if path is not None:
        _refuse_random_model(path)

    import torch

    from ..bench.model_bench import ModelProtocol, checkpoint_of, measure_model
    from ..bench.model_plot import require_matplotlib, save_model_plot
    from .bench_model import print_model_results

    if picture is not None:
        require_matplotlib()
    protocol = ModelProtocol(
        prompts=measured["prompts"],
        batches=measured["batches"],
        context_tokens=measured["context"],
        steps=measured["steps"],
        repeats=measured["repeats"],
        variants=measured["variants"] or VARIANTS,
        max_tokens=measured["max_tokens"],
        time_limit_s=measured["time_limit"],
    )
    with ended_in_order(), checkpoint_of(path, shape, layers, folder) as checkpoint:
        results = measure_model(
            checkpoint,
            device=device,
            dtype=None if dtype is None else getattr(torch, dtype),
            protocol=protocol,
            tell=lambda line: click.echo(line, err=True),
        )
    if as_json:
        print_json(results.as_dict())
    else:
        print_model_results(results)
    if output is not None:
        results.write(output)
    results.require_measured()
    if picture is not None:
        save_model_plot(results, picture)


def _refuse_random_model(path: str) -> None:
    """UsageError where an option of the random model was given beside a PATH, which would ignore it."""
    context = click.get_current_context()
    for name in RANDOM_MODEL:
        if context.get_parameter_source(name) is not ParameterSource.DEFAULT:
            raise click.UsageError(
                f"--{name}: expected no PATH beside it, because it is of the random model that is measured "
                f"without one, got {path!r}. Leave out one of the two.",
                context,
            )


@bench.command()
@click.argument("results", metavar="RESULT...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "-o",
    "--output",
    metavar="FILE",
    required=True,
    type=OutputFile(SUFFIXES),
    help="The picture to write: .svg or .png.",
)
@click.option(
    "--kind",
    type=click.Choice(["burst", "sustained", "eager"]),
    default="burst",
    show_default=True,
    help="Graph replays after rest or under load, or calls without a graph.",
)
@click.option("--format", "formats", multiple=True, help="Only this weight format; can be repeated.")
@json_option
def plot(results: tuple[Path, ...], output: Path, kind: str, formats: tuple[str, ...], as_json: bool) -> None:
    """Draw time over floor against tokens.

    RESULT is a file written by benchmarks/moe_layer.py. Several are drawn as one; where they measured the
    same, the last one counts. A panel for each shape and format, a line for each implementation. One file of
    `bench model` is drawn as `bench model --plot` does.

    \b
    Example:
      marlin-moe bench plot moe_layer.json --format int4 --kind sustained -o sustained.svg
    """
    from ..bench.model_results import is_model_results
    from .bench_model import plot_model
    from .bench_plot import plot_results

    if any(map(is_model_results, results)):
        report = plot_model(results, output)
    else:
        report = plot_results(results, output, kind=kind, formats=formats)
    if as_json:
        print_json(report.as_dict())
        return
    click.echo(
        f"{report.output}: {counted(report.panels, 'panel')}, {counted(report.lines, 'line')}, "
        f"{counted(report.points, 'point')}"
    )
