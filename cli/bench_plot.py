"""Time over floor against tokens: a panel for each shape and format, a line for each implementation."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..kernels.errors import MarlinMoEError
from .bench_results import Measured, Point, Results

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLUMNS = 3
PANEL_INCHES = (4.4, 3.4)
LEAST_RATIO = 0.9  # the floor's line has some room below
RATIO_TICKS = (1, 1.2, 1.5, 2, 3, 4, 5, 7, 10, 20, 50, 100)
MARKERS = "osD^vPX*"
KINDS = {"burst": "burst_us", "sustained": "sustained_us", "eager": "eager_us"}
Panel = tuple[str, str]  # shape, format


class BenchPlotError(MarlinMoEError):
    """Results that give no plot, or nothing to draw them with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlotReport:
    """What was drawn."""

    output: str
    kind: str
    panels: int
    lines: int
    points: int

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def plot_results(
    paths: Sequence[Path], output: Path, *, kind: str = "burst", formats: Sequence[str] = ()
) -> PlotReport:
    """Draw results as `output`, an .svg or .png; where files measured the same, the last one counts.

    Args:
        paths: files of `benchmarks/moe_layer.py`.
        output: what to write.
        kind: `burst`, `sustained` or `eager`.
        formats: only these; all if there are none.

    Raises:
        BenchResultsError: a file that holds no results.
        BenchPlotError: no file has a format; nothing of this kind was measured; no matplotlib; no file can be
            written.
    """
    every = [Results.read(path) for path in paths]
    points = merged(every)
    known = list(dict.fromkeys(point.format for point in points))
    for form in formats:
        if form not in known:
            raise BenchPlotError(
                f"--format: expected one of {', '.join(known) or 'none'}, which {', '.join(map(str, paths))} "
                f"measured, got {form!r}. Choose another, or give more results."
            )
    panels = lines_of([point for point in points if point.format in (formats or known)], KINDS[kind])
    if not panels:
        raise BenchPlotError(
            f"{', '.join(map(str, paths))}: expected {KINDS[kind]} of at least one implementation to draw, "
            "got none. Measure again, or choose another --kind."
        )
    devices = sorted({results.machine.get("device", "unknown device") for results in every})
    figure = draw(panels, title=f"MoE layer, {kind}: time over floor. {', '.join(devices)}")
    save(figure, output)
    drawn = [line for lines in panels.values() for line in lines.values()]
    return PlotReport(
        output=str(output), kind=kind, panels=len(panels), lines=len(drawn), points=sum(map(len, drawn))
    )


def merged(every: Sequence[Results]) -> list[Point]:
    """The points of several runs, one for each shape, format and number of tokens and implementation."""
    found: dict[tuple[str, str, int], dict[str, tuple[Point, Measured]]] = {}
    for results in every:
        for point in results.points:
            place = found.setdefault((point.shape, point.format, point.tokens), {})
            place.update({name: (point, measured) for name, measured in point.measured.items()})
    return [
        Point(
            shape=point.shape,
            format=point.format,
            tokens=point.tokens,
            layers=point.layers,
            active_experts=point.active_experts,
            floor_us=point.floor_us,
            measured={name: measured},
        )
        for place in found.values()
        for name, (point, measured) in place.items()
    ]


def lines_of(points: Sequence[Point], key: str) -> dict[Panel, dict[str, list[tuple[int, float]]]]:
    """{(shape, format): {implementation: [(tokens, time over floor)]}}, without what was not measured."""
    panels: dict[Panel, dict[str, list[tuple[int, float]]]] = {}
    for point in sorted(points, key=lambda point: point.tokens):
        for name, measured in point.measured.items():
            us = getattr(measured, key)
            if us is not None:
                lines = panels.setdefault((point.shape, point.format), {})
                lines.setdefault(name, []).append((point.tokens, us / point.floor_us))
    return panels


def draw(panels: Mapping[Panel, Mapping[str, Sequence[tuple[int, float]]]], *, title: str) -> "Figure":
    """The figure: an implementation has the same colour and marker in every panel."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise BenchPlotError(
            f"matplotlib: expected it to be installed, because plots are drawn with it, got: {error}. "
            "Install it with: pip install 'marlin-moe[bench]'"
        ) from error
    columns = min(COLUMNS, len(panels))
    rows = -(-len(panels) // columns)
    width, height = PANEL_INCHES
    figure = Figure(figsize=(columns * width, rows * height + 0.6), layout="constrained")
    figure.suptitle(title, fontsize=11)
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    names = sorted({name for lines in panels.values() for name in lines}, key=_ours_first)
    for ax, (panel, lines) in zip(axes, panels.items(), strict=False):
        _draw_panel(ax, panel, lines, names)
    for ax in axes[len(panels) :]:
        ax.remove()
    return figure


def save(figure: "Figure", output: Path) -> None:
    """The figure as a file: the same results give the same bytes."""
    import matplotlib

    try:
        with matplotlib.rc_context({"svg.hashsalt": "marlin-moe", "svg.fonttype": "none"}):
            figure.savefig(output, dpi=150, metadata={"Date": None} if output.suffix == ".svg" else None)
    except OSError as error:
        raise BenchPlotError(
            f"{output}: expected a file that can be written, got: {error}. Give another --output."
        ) from error


def _draw_panel(
    ax: "Axes", panel: Panel, lines: Mapping[str, Sequence[tuple[int, float]]], names: Sequence[str]
) -> None:
    for name, line in lines.items():
        index = names.index(name)
        tokens, ratios = zip(*line, strict=True)
        ax.plot(
            tokens,
            ratios,
            label=name,
            color=f"C{index % 10}",
            marker=MARKERS[index % len(MARKERS)],
            markersize=4,
            linewidth=2.2 if name == "ours" else 1.2,
        )
    shape, form = panel
    ax.set_title(shape if form == "int4" else f"{shape}, {form}", fontsize=10)
    ax.set_xscale("log", base=2)
    ticks = sorted({tokens for line in lines.values() for tokens, _ in line})
    ax.set_xticks(ticks, [_count_text(tick) for tick in ticks], fontsize=7)
    ax.set_yscale("log", base=2)
    most = max(ratio for line in lines.values() for _, ratio in line)
    ax.set_ylim(LEAST_RATIO, max(1.5, most) * 1.1)
    shown = [tick for tick in RATIO_TICKS if tick <= ax.get_ylim()[1]]
    ax.set_yticks(shown, [f"{tick:g}" for tick in shown], fontsize=8)
    ax.minorticks_off()
    ax.axhline(1.0, color="black", linewidth=0.8, linestyle="--")
    ax.grid(visible=True, alpha=0.3)
    ax.set_xlabel("tokens")
    ax.set_ylabel("time / floor")
    ax.legend(fontsize=7)


def _count_text(count: int) -> str:
    return f"{count // 1024}k" if count % 1024 == 0 else str(count)


def _ours_first(name: str) -> tuple[bool, str]:
    return not name.startswith("ours"), name
