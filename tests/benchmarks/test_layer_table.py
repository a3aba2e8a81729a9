"""What a run prints."""

import json
import re
from pathlib import Path

from layer_problems import SHAPES
from layer_table import header_line, point_lines, quoted_us

from marlin_moe.cli.bench_results import Measured, Point

NAMES = ("ours", "ours-per-call", "vllm", "humming")


def point(**changes: object) -> Point:
    values: dict = {
        "shape": "qwen3-30b-a3b",
        "format": "int4",
        "tokens": 8,
        "layers": 8,
        "active_experts": 50.0,
        "floor_us": 20.0,
        "measured": {
            "ours": Measured(burst_us=30.0, sustained_us=33.0, eager_us=35.0, relative_error=3e-3),
            "ours-per-call": Measured(burst_us=31.0, sustained_us=34.0),
            "vllm": Measured(burst_us=60.0, sustained_us=66.0, eager_us=150.0),
            "humming": Measured(refused="ValueError: no act-order"),
        },
    }
    return Point(**(values | changes))


def test_columns_stand_under_their_heads() -> None:
    head, row = header_line(NAMES), point_lines(point(), NAMES, {("qwen3-30b-a3b", 8): 62.7})[0]
    assert len(head) == len(row)
    heads = [match.end() for match in re.finditer(r"\S+(?: \S+)?(?=\s{2,}|$)", head)]
    assert heads == [match.end() for match in re.finditer(r"\S+", row)]
    assert row.split() == [
        "8", "20.0", "30.0", "31.0", "60.0", "-", "1.50", "0.50", "33.0", "1.65", "0.50", "62.7",
    ]  # fmt: skip


def test_what_is_besides_comes_below() -> None:
    lines = [line.strip() for line in point_lines(point(), NAMES, {})[1:]]
    assert lines == [
        "eager us: ours 35.0, vllm 150.0; error: ours 3.0e-03",
        "humming: ValueError: no act-order",
    ]


def test_the_best_peer_is_none_of_ours() -> None:
    measured = point().measured
    assert point().best_peer_us("burst") == 60.0
    assert point(measured={"ours": measured["ours"]}).best_peer_us("burst") is None


def test_without_ours_nothing_is_compared() -> None:
    names = ("vllm",)
    row = point_lines(point(), names, {})[0]
    assert row.split() == ["8", "20.0", "60.0", "-"]
    assert len(row) == len(header_line(names))


def test_quoted_figures_are_of_int4_and_of_shapes_that_are_measured() -> None:
    quoted = quoted_us()
    assert {shape for shape, _ in quoted} == SHAPES.keys()
    assert quoted["kimi-k2.5-tp8", 1] == 25.5
    row = point_lines(point(shape="kimi-k2.5-tp8", tokens=1, format="int8"), NAMES, quoted)[0]
    assert row.split()[-1] == "-"


def test_another_file_can_be_quoted(tmp_path: Path) -> None:
    path = tmp_path / "quoted.json"
    path.write_text(json.dumps({"points": [{"shape": "a", "tokens": 2, "us": 1.5}]}))
    assert quoted_us(path) == {("a", 2): 1.5}
