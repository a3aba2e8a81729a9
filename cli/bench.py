"""`marlin-moe bench plot RESULT.json…`."""

from pathlib import Path

import click

from .options import json_option
from .output import counted, print_json

SUFFIXES = (".svg", ".png")


def image_path(context: click.Context, parameter: click.Parameter, value: Path) -> Path:
    """The path, with a suffix that can be drawn.

    Raises:
        click.BadParameter: another suffix.
    """
    if value.suffix not in SUFFIXES:
        raise click.BadParameter(
            f"--output: expected a name that ends in {' or '.join(SUFFIXES)}, which can be drawn, got "
            f"{str(value)!r}."
        )
    return value


@click.group()
def bench() -> None:
    """Show what layer benchmarks found."""


@bench.command()
@click.argument("results", metavar="RESULT...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "-o",
    "--output",
    metavar="FILE",
    required=True,
    type=click.Path(path_type=Path),
    callback=image_path,
    help="The picture to write: .svg or .png.",
)
@click.option(
    "--kind",
    type=click.Choice(["burst", "sustained", "eager"]),
    default="burst",
    show_default=True,
    help="Graph replays after rest or under load, or calls without a graph.",
)
@json_option
def plot(results: tuple[Path, ...], output: Path, kind: str, as_json: bool) -> None:
    """Draw time over floor against tokens.

    RESULT is a file written by benchmarks/moe_layer.py. Several are drawn as one; where they measured the
    same, the last one counts. A panel for each shape and format, a line for each implementation.

    \b
    Example:
      marlin-moe bench plot decode.json prefill.json -o speed.svg
    """
    from .bench_plot import plot_results

    report = plot_results(results, output, kind=kind)
    if as_json:
        print_json(report.as_dict())
        return
    click.echo(
        f"{report.output}: {counted(report.panels, 'panel')}, {counted(report.lines, 'line')}, "
        f"{counted(report.points, 'point')}"
    )
