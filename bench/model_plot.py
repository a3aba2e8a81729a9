"""Time to first token against the prompt, and time per token against the batch: a line for each variant."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from .model_results import ModelResults, ModelResultsError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PANELS = (
    ("ttft_ms", "time to first token", "tokens of the prompt"),
    ("token_ms", "time per token, generate()", "sequences"),
    ("graph_token_ms", "time per token, CUDA graph", "sequences"),
)
PANEL_INCHES = (4.2, 3.4)
MARKERS = "osD^"


def require_matplotlib() -> None:
    """Raise ModelResultsError, which says how to install it, where matplotlib cannot be imported."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ModelResultsError(
            f"matplotlib: expected it to be installed, because plots are drawn with it, got: {error}. "
            "Install it with: pip install 'marlin-moe[bench]'"
        ) from error


def draw_model(results: ModelResults) -> "Figure":
    """The figure; panels of which nothing was measured are left out.

    Raises:
        ModelResultsError: nothing was measured; no matplotlib.
    """
    require_matplotlib()
    from matplotlib.figure import Figure

    shown = [panel for panel in PANELS if any(getattr(run, panel[0]) for run in results.runs)]
    if not shown:
        raise ModelResultsError("results: expected at least one measured variant to draw, got none.")
    width, height = PANEL_INCHES
    figure = Figure(figsize=(width * len(shown), height + 0.5), layout="constrained")
    checkpoint = results.checkpoint
    figure.suptitle(
        f"{checkpoint['name']}, {checkpoint['layers']} layers, {checkpoint['dtype']}. "
        f"{results.machine.get('device', 'unknown device')}",
        fontsize=11,
    )
    for ax, (key, title, label) in zip(
        figure.subplots(1, len(shown), squeeze=False).flat, shown, strict=True
    ):
        lines = {run.variant: getattr(run, key) for run in results.runs if getattr(run, key)}
        _draw_panel(ax, lines, [run.variant for run in results.runs])
        ax.set_title(title, fontsize=10)
        ax.set_xlabel(label)
        ax.set_ylabel("ms")
    return figure


def _draw_panel(ax: "Axes", lines: Mapping[str, Mapping[int, float]], names: list[str]) -> None:
    for name, line in lines.items():
        index = names.index(name)
        counts, times = zip(*sorted(line.items()), strict=True)
        marker = MARKERS[index % len(MARKERS)]
        ax.plot(counts, times, label=name, color=f"C{index}", marker=marker, markersize=4)
    ticks = sorted({count for line in lines.values() for count in line})
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.set_xticks(ticks, [str(tick) for tick in ticks], fontsize=8)
    ax.minorticks_off()
    ax.grid(visible=True, alpha=0.3)
    ax.legend(fontsize=7)


def save_model_plot(results: ModelResults, output: Path) -> None:
    """The figure as a file: the same results give the same bytes."""
    figure = draw_model(results)
    import matplotlib

    try:
        with matplotlib.rc_context({"svg.hashsalt": "marlin-moe", "svg.fonttype": "none"}):
            figure.savefig(output, dpi=150, metadata={"Date": None} if output.suffix == ".svg" else None)
    except OSError as error:
        raise ModelResultsError(
            f"{output}: expected a file that can be written, got: {error}. Give another --plot."
        ) from error
