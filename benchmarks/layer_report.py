"""What a run found, beside the figures asked for, and as the table of the README.

    python benchmarks/layer_report.py                                    # benchmarks/results/moe_layer.json
    python benchmarks/layer_report.py decode.json prefill.json --kind sustained
    python benchmarks/layer_report.py --markdown

Of several files the last that measured a point counts. `moe_layer.py` prints the same at its end.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import click

sys.path.insert(0, str(Path(__file__).resolve().parent))  # PYTHONSAFEPATH leaves it out

from layer_targets import (
    MEAN_OVER_BEST_PEER,
    MOST_OVER_BEST_PEER,
    MOST_OVER_FLOOR,
    WORST_OVER_BEST_PEER,
)

from marlin_moe.cli.bench_results import KINDS, OURS, Comparison, Point, Results

RESULTS = Path(__file__).resolve().parent / "results" / "moe_layer.json"
ASKED_FORMAT = "int4"
NAME_WIDTH, CELL_WIDTH = 18, 11
MISSED = "*"

Cell = Callable[[Point | None, str, int], str]
"""(point, shape, M) -> the text of a cell."""


def report_lines(points: Sequence[Point], *, kind: str = "burst") -> list[str]:
    """Ours over the floor and over the best peer, each `measured/asked for`, and what else counts."""
    asked = {point.key[::2]: point for point in points if point.format == ASKED_FORMAT}
    lines = []
    if asked:
        shapes = list(dict.fromkeys(shape for shape, _ in asked))
        tokens = sorted({count for _, count in asked})
        lines += ["", f"ours over the floor, {ASKED_FORMAT}, {kind}: measured/asked for ({MISSED} missed)"]
        lines += _table(asked, shapes, tokens, lambda *place: _floor_cell(*place, kind=kind))
        lines += ["", f"ours over the best peer, {ASKED_FORMAT}, {kind}: measured/at most ({MISSED} missed)"]
        lines += _table(asked, shapes, tokens, lambda *place: _peer_cell(*place, kind=kind))
    return [*lines, "", *_mean_lines(points), *_size_lines(points), *_refused_lines(points)]


def missed(points: Sequence[Point], *, kind: str = "burst") -> list[tuple[str, str, int]]:
    """(what, shape, M) of every figure asked for that was measured and is not met; what is floor or peer."""
    found = []
    for point in points:
        if point.format != ASKED_FORMAT:
            continue
        over_floor, over_peer = point.over_floor(kind), point.over_best_peer(kind)
        most = _most_over_floor(point.shape, point.tokens)
        if most is not None and over_floor is not None and over_floor > most:
            found.append(("floor", point.shape, point.tokens))
        if over_peer is not None and over_peer > _most_over_peer(point.tokens):
            found.append(("peer", point.shape, point.tokens))
    return found


def markdown_lines(points: Sequence[Point], *, kind: str = "burst") -> list[str]:
    """The README's table: four rows for each shape, a column for each number of tokens."""
    asked = {point.key[::2]: point for point in points if point.format == ASKED_FORMAT}
    tokens = sorted({count for _, count in asked})
    lines = [_row("tokens", map(str, tokens)), _row("---", ["--:"] * len(tokens))]
    for shape in dict.fromkeys(shape for shape, _ in asked):
        found = [asked.get((shape, count)) for count in tokens]
        rows: dict[str, Callable[[Point], str]] = {
            f"**{shape}**: ours": lambda point: _short(point.us(kind)),
            "best peer": lambda point: _short(point.best_peer_us(kind)),
            "ours × floor": lambda point: _ratio(point.over_floor(kind)),
            "ours ÷ best peer": lambda point: _ratio(point.over_best_peer(kind)),
        }
        for label, text in rows.items():
            lines.append(_row(label, ("–" if point is None else text(point) for point in found)))
    return lines


def _table(
    points: Mapping[tuple[str, int], Point], shapes: Sequence[str], tokens: Sequence[int], cell: Cell
) -> Iterator[str]:
    yield "M".ljust(NAME_WIDTH) + "".join(str(count).rjust(CELL_WIDTH) for count in tokens)
    for shape in shapes:
        texts = [cell(points.get((shape, count)), shape, count) for count in tokens]
        yield shape.ljust(NAME_WIDTH) + "".join(text.rjust(CELL_WIDTH) for text in texts)


def _floor_cell(point: Point | None, shape: str, tokens: int, *, kind: str) -> str:
    found = None if point is None else point.over_floor(kind)
    return _beside(found, _most_over_floor(shape, tokens))


def _peer_cell(point: Point | None, shape: str, tokens: int, *, kind: str) -> str:
    found = None if point is None else point.over_best_peer(kind)
    return _beside(found, _most_over_peer(tokens))


def _most_over_floor(shape: str, tokens: int) -> float | None:
    return MOST_OVER_FLOOR.get(shape, {}).get(tokens)


def _most_over_peer(tokens: int) -> float:
    """What holds for this M, and for every point."""
    return min(MOST_OVER_BEST_PEER.get(tokens, 1.0), WORST_OVER_BEST_PEER)


def _beside(found: float | None, most: float | None) -> str:
    if found is None:
        return "-"
    if most is None:
        return f"{found:.2f} "
    return f"{found:.2f}/{most:.2f}{MISSED if found > most else ' '}"


def _mean_lines(points: Sequence[Point]) -> Iterator[str]:
    for form in dict.fromkeys(point.format for point in points):
        of_form = [point for point in points if point.format == form]
        for kind in KINDS:
            found = Comparison.of(of_form, kind)
            if found is not None:
                most = f" (at most {MEAN_OVER_BEST_PEER:.2f}, {WORST_OVER_BEST_PEER:.2f})"
                yield (
                    f"{form} {kind}: over the best peer {found.geometric_mean:.3f} in the geometric mean of "
                    f"{found.points} points, {found.worst:.3f} at worst{most if form == ASKED_FORMAT else ''}"
                )


def _size_lines(points: Sequence[Point]) -> Iterator[str]:
    """Where the product limits, where the host does, and the workspace, for each shape and format."""
    for shape, form in dict.fromkeys(point.key[:2] for point in points):
        found = sorted((p for p in points if p.key[:2] == (shape, form)), key=lambda point: point.tokens)
        first, last = found[0], found[-1]
        parts = []
        if (us := first.us("eager")) is not None:
            parts.append(f"eager {us:.1f} us at M = {first.tokens}")
        own = last.measured.get(OURS)
        if own is not None and own.matmul_fraction is not None:
            parts.append(f"{own.matmul_fraction:.2f} of the matmul rate under load at M = {last.tokens}")
        if own is not None and own.layer_workspace_bytes is not None:
            parts.append(f"workspace {own.layer_workspace_bytes / 2**20:,.0f} MiB")
        if parts:
            yield f"{shape} {form}: {', '.join(parts)}"


def _refused_lines(points: Sequence[Point]) -> Iterator[str]:
    """What no figure above takes into account."""
    reasons: dict[tuple[str, str, str], list[int]] = {}
    for point in points:
        for name, found in point.measured.items():
            if found.refused is not None:
                place = f"{point.shape} {point.format}"
                reasons.setdefault((name, place, found.refused), []).append(point.tokens)
    for (name, place, reason), tokens in reasons.items():
        counts = ", ".join(map(str, sorted(tokens)))
        yield f"not measured: {name}, {place}, M = {counts}: {reason}"


def _short(us: float | None) -> str:
    return "–" if us is None else f"{us:.1f}" if us < 100 else f"{us:,.0f}"


def _ratio(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def _row(label: str, cells: "Iterator[str] | Sequence[str] | map[str]") -> str:
    return f"| {label} | {' | '.join(cells)} |"


@click.command(help=__doc__.partition("\n")[0])
@click.argument("files", nargs=-1, type=click.Path(path_type=Path))
@click.option("--kind", type=click.Choice(KINDS), default=KINDS[0], show_default=True)
@click.option("--markdown", is_flag=True, help="The README's table.")
def main(files: tuple[Path, ...], kind: str, markdown: bool) -> None:
    """Print."""
    every = [Results.read(path) for path in files or [RESULTS]]
    points = {point.key: point for results in every for point in results.points}
    lines = markdown_lines if markdown else report_lines
    click.echo("\n".join(lines(list(points.values()), kind=kind)))


if __name__ == "__main__":
    main()
