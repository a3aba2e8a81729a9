"""Points of a layer benchmark's results, with figures that are made up."""

from __future__ import annotations

from marlin_moe.cli.bench_results import Measured, Point


def layer_point(
    measured: dict[str, Measured],
    *,
    shape: str = "m",
    tokens: int = 1,
    form: str = "int4",
    floor_us: float = 10.0,
) -> Point:
    """A point of eight layers that measured these implementations."""
    return Point(
        shape=shape,
        format=form,
        tokens=tokens,
        layers=8,
        active_experts=8.0,
        floor_us=floor_us,
        measured=measured,
    )
