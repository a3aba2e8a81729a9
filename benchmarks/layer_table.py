"""The table of a run: microseconds, times the floor, and the ratio to the best peer."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from layer_problems import Ceilings

from marlin_moe.cli.bench_results import OURS, Point

QUOTED = Path(__file__).parent / "results" / "quoted_sglang.json"
WIDTH = 9


def quoted_us(path: Path = QUOTED) -> dict[tuple[str, int], float]:
    """{(shape, tokens): microseconds} of SGLang, symmetric int4, measured before on such a device."""
    report = json.loads(path.read_text())
    return {(entry["shape"], entry["tokens"]): entry["us"] for entry in report["points"]}


def header_line(names: Sequence[str]) -> str:
    """Column heads; `sust` is under load, `SGLang*` quoted."""
    columns = ["M", "floor", *names]
    if OURS in names:
        columns += ["x floor", "/best", "sust", "x floor", "/best"]
    return "".join(column.rjust(_width(column)) for column in [*columns, "SGLang*"])


def ceilings_line(machine: Mapping[str, str], ceilings: Ceilings) -> str:
    """What the run stands on."""
    return (
        f"# {machine['device']}, torch {machine['torch']}: copy {ceilings.copy_bytes_per_s / 1e12:.2f} TB/s, "
        f"read {ceilings.read_bytes_per_s / 1e12:.2f} TB/s, bf16 matmul "
        f"{ceilings.matmul_flops_per_s / 1e12:.0f} TFLOP/s"
    )


def point_lines(point: Point, names: Sequence[str], quoted: Mapping[tuple[str, int], float]) -> list[str]:
    """The point's row, then a line each for eager times and errors and for every refusal."""
    cells = [(str(point.tokens), "M"), (f"{point.floor_us:.1f}", "floor")]
    cells += [(_us(point.measured[name].burst_us), name) for name in names]
    if OURS in names:
        cells += _ratios(point, "burst")
        cells += [(_us(point.us("sustained")), "sust")]
        cells += _ratios(point, "sustained")
    published = quoted.get((point.shape, point.tokens)) if point.format == "int4" else None
    cells.append((_us(published), "SGLang*"))
    row = "".join(text.rjust(_width(column)) for text, column in cells)
    return [row, *(f"{'':6}{line}" for line in _remarks(point))]


def _ratios(point: Point, kind: str) -> list[tuple[str, str]]:
    return [(_ratio(point.over_floor(kind)), "x floor"), (_ratio(point.over_best_peer(kind)), "/best")]


def _remarks(point: Point) -> Iterator[str]:
    parts = []
    for label, key, form in (
        ("eager us", "eager_us", ".1f"),
        ("error", "relative_error", ".1e"),
        ("from the first", "difference", ".1e"),
    ):
        found = {name: getattr(entry, key) for name, entry in point.measured.items()}
        texts = [f"{name} {value:{form}}" for name, value in found.items() if value is not None]
        if texts:
            parts.append(f"{label}: {', '.join(texts)}")
    if parts:
        yield "; ".join(parts)
    yield from (f"{name}: {entry.refused}" for name, entry in point.measured.items() if entry.refused)


def _width(column: str) -> int:
    return max(WIDTH, len(column) + 2) if column != "M" else 6


def _us(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
