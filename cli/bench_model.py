"""What a model benchmark found, as a table or a picture."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from .bench_plot import PlotReport
from .output import bytes_text, print_table

if TYPE_CHECKING:
    from ..bench.model_results import ModelResults, ModelRun


def print_model_results(results: "ModelResults") -> None:
    """A line for each variant, then what was skipped and why."""
    checkpoint, protocol = results.checkpoint, results.protocol
    packed = checkpoint["packed_bytes"]
    click.echo(
        f"{checkpoint['name']}: {checkpoint['model']}, {checkpoint['layers']} layers, {bytes_text(packed)}, "
        f"{checkpoint['dtype']}, on {results.machine['device']}"
    )
    columns = ["variant"]
    columns += [f"first token {tokens}" for tokens in _counts(results, "ttft_ms")]
    columns += [f"token x{batch}" for batch in _counts(results, "token_ms")]
    columns += [f"graph x{batch}" for batch in _counts(results, "graph_token_ms")]
    columns += ["peak", "of packed"]
    rows = [_row(run, results) for run in results.runs]
    click.echo()
    print_table(columns, rows, numbers=columns[1:])
    click.echo(
        f"\nms: until the first token of a prompt; per token of N sequences behind "
        f"{protocol['context_tokens']} tokens, in generate() and as a CUDA graph."
    )
    for run in results.runs:
        for point, reason in run.skipped.items():
            click.echo(f"{run.variant}, {point}: {reason}")


def plot_model(paths: Sequence[Path], output: Path) -> PlotReport:
    """Draw one file of `bench model` as `output`.

    Raises:
        ModelResultsError: more than one file; one that holds no results; nothing to draw, or to draw with.
    """
    from ..bench.model_plot import save_model_plot
    from ..bench.model_results import ModelResults, ModelResultsError

    if len(paths) != 1:
        raise ModelResultsError(
            f"{', '.join(map(str, paths))}: expected one file where it is of a model benchmark, because each "
            f"is a picture of its own, got {len(paths)}. Draw them one by one."
        )
    results = ModelResults.read(paths[0])
    save_model_plot(results, output)
    drawn = [
        [line for run in results.runs if (line := getattr(run, key))]
        for key in ("ttft_ms", "token_ms", "graph_token_ms")
    ]
    lines = [line for panel in drawn for line in panel]
    return PlotReport(
        output=str(output),
        kind="model",
        panels=len([panel for panel in drawn if panel]),
        lines=len(lines),
        points=sum(map(len, lines)),
    )


def _counts(results: "ModelResults", key: str) -> list[int]:
    """The sizes at which any variant was measured."""
    return sorted({count for run in results.runs for count in getattr(run, key)})


def _row(run: "ModelRun", results: "ModelResults") -> list[str]:
    cells = [run.variant]
    for key in ("ttft_ms", "token_ms", "graph_token_ms"):
        measured = getattr(run, key)
        cells += [f"{measured[n]:.2f}" if n in measured else "-" for n in _counts(results, key)]
    if run.peak_bytes is None:
        return [*cells, "-", "-"]
    return [*cells, bytes_text(run.peak_bytes), f"{run.peak_bytes / results.checkpoint['packed_bytes']:.2f}"]
