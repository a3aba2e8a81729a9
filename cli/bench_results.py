"""What a layer benchmark found, as a file: `Results`, its `Point`s, and what was `Measured` of each."""

import json
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from ..kernels.errors import MarlinMoEError

FORMAT = "marlin-moe layer benchmark"
VERSION = 1
OURS = "ours"  # other ways to run it have names that begin so, and are no peers
KINDS = ("burst", "sustained")


class BenchResultsError(MarlinMoEError):
    """A file that holds no results of a layer benchmark."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One implementation at one point; None is not measured.

    Attributes:
        burst_us, sustained_us: median microseconds a layer of graph replays, after rest and under load.
        eager_us: microseconds a layer without a graph.
        matmul_fraction: operations per second under load over the bf16 matmul rate of the same run.
        workspace_bytes: scratch that the call needs, where the implementation says.
        layer_workspace_bytes: scratch that the layer keeps for calls of all sizes, shared with other layers.
        relative_error: Frobenius norm of the error over that of the float64 result, on some rows.
        difference: the same of this output against the first implementation's, on all rows.
        refused: why it does not run.
    """

    burst_us: float | None = None
    sustained_us: float | None = None
    eager_us: float | None = None
    matmul_fraction: float | None = None
    workspace_bytes: int | None = None
    layer_workspace_bytes: int | None = None
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

    @property
    def key(self) -> tuple[str, str, int]:
        """What was measured."""
        return self.shape, self.format, self.tokens

    def us(self, kind: str, name: str = OURS) -> float | None:
        """An implementation's microseconds, `kind` being burst, sustained or eager; None if not measured."""
        found = self.measured.get(name)
        us: float | None = None if found is None else getattr(found, f"{kind}_us")
        return us

    def over_floor(self, kind: str, name: str = OURS) -> float | None:
        """An implementation's time over the floor."""
        us = self.us(kind, name)
        return None if us is None else us / self.floor_us

    def best_peer_us(self, kind: str) -> float | None:
        """The time of the fastest implementation that is not ours."""
        found = (self.us(kind, name) for name in self.measured if not name.startswith(OURS))
        return min((us for us in found if us is not None), default=None)

    def over_best_peer(self, kind: str, name: str = OURS) -> float | None:
        """An implementation's time over the best peer's."""
        us, best = self.us(kind, name), self.best_peer_us(kind)
        return None if us is None or best is None else us / best


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Our time over the best peer's of the same run, over all points where both were measured."""

    points: int
    geometric_mean: float
    worst: float

    @classmethod
    def of(cls, points: Sequence[Point], kind: str) -> "Comparison | None":
        """Of these points; None where nothing can be compared."""
        found = [ratio for point in points if (ratio := point.over_best_peer(kind)) is not None]
        if not found:
            return None
        mean = statistics.geometric_mean(found)
        return cls(points=len(found), geometric_mean=round(mean, 4), worst=round(max(found), 4))


@dataclass(slots=True, kw_only=True)
class Results:
    """A run: what it ran on, how, the ceilings it measured, and its points so far."""

    machine: dict[str, str]
    protocol: dict[str, float]
    ceilings: dict[str, float]
    points: list[Point] = field(default_factory=list)

    def add(self, point: Point) -> None:
        """A point more, or instead of the one of the same shape, format and number of tokens."""
        for index, other in enumerate(self.points):
            if other.key == point.key:
                self.points[index] = point
                return
        self.points.append(point)

    def joined(self, earlier: "Results") -> "Results":
        """This run, with the points of an earlier one of the same device.

        Every point keeps the floor and the fractions of the run that measured it. Ceilings and protocol are
        this run's; where the machines differ, in the commit for instance, both are named.

        Raises:
            BenchResultsError: another device.
        """
        device, other = self.machine.get("device"), earlier.machine.get("device")
        if device != other:
            raise BenchResultsError(
                f"machine.device: expected {other!r}, because points of one file are compared with each "
                f"other, got {device!r}. Write to another file."
            )
        machine = dict(self.machine)
        for key, before in earlier.machine.items():
            now = machine.setdefault(key, before)
            if now not in before.split(", "):
                machine[key] = f"{before}, {now}"
            elif now != before:
                machine[key] = before
        return Results(
            machine=machine,
            protocol=self.protocol,
            ceilings=self.ceilings,
            points=[*earlier.points, *self.points],
        )

    def summary(self) -> dict[str, dict[str, Any]]:
        """{format: {kind: Comparison as a dict}}, for those that can be compared."""
        found: dict[str, dict[str, Any]] = {}
        for form in dict.fromkeys(point.format for point in self.points):
            points = [point for point in self.points if point.format == form]
            comparisons = {kind: Comparison.of(points, kind) for kind in KINDS}
            kinds = {kind: asdict(one) for kind, one in comparisons.items() if one is not None}
            if kinds:
                found[form] = kinds
        return found

    def write(self, path: Path) -> None:
        """The whole file anew, by renaming: a run that is cut off leaves the points it had."""
        path.parent.mkdir(parents=True, exist_ok=True)
        report = {"format": FORMAT, "version": VERSION, "summary": self.summary(), **asdict(self)}
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
