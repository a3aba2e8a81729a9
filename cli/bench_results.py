"""What a layer benchmark found, as a file: `Results`, its `Point`s, and what was `Measured` of each."""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from ..kernels.errors import MarlinMoEError

FORMAT = "marlin-moe layer benchmark"
VERSION = 1


class BenchResultsError(MarlinMoEError):
    """A file that holds no results of a layer benchmark."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One implementation at one point; None is not measured.

    Attributes:
        burst_us, sustained_us: median microseconds a layer of graph replays, after rest and under load.
        eager_us: microseconds a layer without a graph.
        workspace_bytes: scratch that the call needs, where the implementation says.
        relative_error: Frobenius norm of the error over that of the float64 result, on some rows.
        difference: the same of this output against the first implementation's, on all rows.
        refused: why it does not run.
    """

    burst_us: float | None = None
    sustained_us: float | None = None
    eager_us: float | None = None
    workspace_bytes: int | None = None
    relative_error: float | None = None
    difference: float | None = None
    refused: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A layer at a number of tokens: the floor, and every implementation by name."""

    shape: str
    format: str
    tokens: int
    layers: int
    active_experts: float
    floor_us: float
    measured: dict[str, Measured]


@dataclass(slots=True, kw_only=True)
class Results:
    """A run: what it ran on, how, the ceilings it measured, and its points so far."""

    machine: dict[str, str]
    protocol: dict[str, float]
    ceilings: dict[str, float]
    points: list[Point] = field(default_factory=list)

    def write(self, path: Path) -> None:
        """The whole file anew, by renaming: a run that is cut off leaves the points it had."""
        path.parent.mkdir(parents=True, exist_ok=True)
        report = {"format": FORMAT, "version": VERSION, **asdict(self)}
        for point in report["points"]:
            point["measured"] = {
                name: {key: value for key, value in found.items() if value is not None}
                for name, found in point["measured"].items()
            }
        temporary = path.with_suffix(".partial")
        temporary.write_text(json.dumps(report, indent=1) + "\n")
        os.replace(temporary, path)

    @classmethod
    def read(cls, path: Path) -> "Results":
        """The results in a file.

        Raises:
            BenchResultsError: the file cannot be read, or holds something else; the text names the key.
        """
        try:
            report = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise BenchResultsError(
                f"{path}: expected results of benchmarks/moe_layer.py as JSON, got: {error}."
            ) from error
        reader = _Reader(path)
        reader.require(
            isinstance(report, dict) and report.get("format") == FORMAT,
            "format",
            f"{FORMAT!r}",
            report.get("format") if isinstance(report, dict) else report,
        )
        reader.require(report.get("version") == VERSION, "version", str(VERSION), report.get("version"))
        points = reader.value(report, "points", list)
        return cls(
            machine=reader.value(report, "machine", dict),
            protocol=reader.value(report, "protocol", dict),
            ceilings=reader.value(report, "ceilings", dict),
            points=[reader.point(entry, f"points[{index}]") for index, entry in enumerate(points)],
        )


@dataclass(frozen=True, slots=True)
class _Reader:
    """Takes a report apart; every error names the file and the key."""

    path: Path

    def require(self, fits: bool, key: str, expected: str, found: object) -> None:
        if not fits:
            text = repr(found)
            raise BenchResultsError(
                f"{self.path}: {key}: expected {expected}, because benchmarks/moe_layer.py writes it, got "
                f"{text if len(text) < 60 else text[:57] + '...'}. Run the benchmark again."
            )

    def value(self, holder: Mapping[str, Any], key: str, kind: type, place: str = "") -> Any:
        found = holder.get(key)
        fits = isinstance(found, (int, float) if kind is float else kind) and not isinstance(found, bool)
        self.require(fits, f"{place}{key}", kind.__name__, found)
        return found

    def point(self, entry: Any, place: str) -> Point:
        self.require(isinstance(entry, dict), place, "dict", entry)
        values: dict[str, Any] = {
            key: self.value(entry, key, kind, f"{place}.")
            for key, kind in (
                ("shape", str),
                ("format", str),
                ("tokens", int),
                ("layers", int),
                ("active_experts", float),
                ("floor_us", float),
            )
        }
        self.require(values["floor_us"] > 0, f"{place}.floor_us", "a positive number", values["floor_us"])
        measured = self.value(entry, "measured", dict, f"{place}.")
        return Point(
            **values,
            measured={
                name: self.measured(found, f"{place}.measured.{name}") for name, found in measured.items()
            },
        )

    def measured(self, entry: Any, place: str) -> Measured:
        self.require(isinstance(entry, dict), place, "dict", entry)
        known = {item.name for item in fields(Measured)}
        self.require(entry.keys() <= known, place, f"only {sorted(known)}", sorted(entry))
        for key in entry:
            self.value(entry, key, str if key == "refused" else float, f"{place}.")
        return Measured(**entry)
