"""What a run found beside what was asked for, with figures that are made up."""

from dataclasses import replace
from pathlib import Path

import layer_report
import pytest
from click.testing import CliRunner
from layer_problems import ALL_TOKENS, SHAPES
from layer_report import markdown_lines, missed, report_lines
from layer_targets import MOST_OVER_BEST_PEER, MOST_OVER_FLOOR

from layer_points import layer_point
from marlin_moe.cli.bench_results import Measured, Point, Results


def point(shape: str, tokens: int, *, over_floor: float, over_peer: float, form: str = "int4") -> Point:
    """A floor of 100 us, and a peer that is slower than the best one."""
    us = 100 * over_floor
    best = us / over_peer
    return layer_point(
        {
            "ours": Measured(
                burst_us=us,
                sustained_us=us * 1.1,
                eager_us=us + 20 if tokens == 1 else None,
                matmul_fraction=0.625,
                layer_workspace_bytes=3 << 20,
            ),
            "vllm": Measured(burst_us=best * 2, sustained_us=best * 2.2),
            "humming": Measured(burst_us=best, sustained_us=best * 1.1),
        },
        shape=shape,
        tokens=tokens,
        form=form,
        floor_us=100.0,
    )


def met() -> list[Point]:
    """Every figure asked for is met, by a little."""
    return [
        point(
            shape,
            tokens,
            over_floor=0.99 * MOST_OVER_FLOOR[shape].get(tokens, 5.0),
            over_peer=0.99 * min(0.95, MOST_OVER_BEST_PEER[tokens]),
        )
        for shape in SHAPES
        for tokens in ALL_TOKENS
    ]


def test_what_is_asked_for() -> None:
    assert MOST_OVER_FLOOR.keys() == SHAPES.keys()
    assert MOST_OVER_BEST_PEER.keys() == set(ALL_TOKENS)
    assert [len(MOST_OVER_FLOOR[shape]) for shape in SHAPES] == [14, 14, 14, 8, 5]
    assert MOST_OVER_FLOOR["kimi-k2.5-tp8"][2048] == 2.0
    assert MOST_OVER_FLOOR["kimi-k2.5-ep8"][256] == 1.2
    assert MOST_OVER_FLOOR["qwen3-30b-a3b"][128] == 1.5
    assert MOST_OVER_BEST_PEER[256] == pytest.approx(0.909, abs=1e-3)


def test_nothing_is_missed_where_all_is_met_and_no_more_than_is() -> None:
    points = met()
    assert missed(points) == []
    points[3] = point("kimi-k2.5-tp8", 8, over_floor=1.36, over_peer=0.96)
    points[-1] = point("mixtral-8x7b", 8192, over_floor=9.0, over_peer=0.84)
    points.append(point("qwen3-30b-a3b", 8, over_floor=9.0, over_peer=9.0, form="int8"))
    assert missed(points) == [
        ("floor", "kimi-k2.5-tp8", 8),
        ("peer", "kimi-k2.5-tp8", 8),
        ("peer", "mixtral-8x7b", 8192),
    ]
    text = "\n".join(report_lines(points))
    assert text.count("*") == 3 + 2, "a star at each, and one in each heading"
    assert "1.36/1.35*" in text
    assert "0.96/0.95*" in text
    assert "0.84/0.83*" in text


def test_every_line_of_a_table_has_its_cells_under_the_heads() -> None:
    lines = report_lines(met())
    start = lines.index("ours over the floor, int4, burst: measured/asked for (* missed)") + 1
    table = lines[start : start + 6]
    assert table[0].split() == ["M", *map(str, ALL_TOKENS)]
    assert [line.split()[0] for line in table[1:]] == list(SHAPES)
    assert {len(line.split()) for line in table} == {15}
    assert {len(line) for line in table} == {len(table[0])}


def test_what_else_counts_is_said() -> None:
    points = met()[:14]
    points.append(point("kimi-k2.5-tp8", 8, over_floor=2.0, over_peer=0.5, form="int8"))
    refused = Measured(refused="ValueError: no act-order")
    points[-1].measured["vllm"] = refused
    lines = report_lines(points)
    assert "int8 burst: over the best peer 0.500 in the geometric mean of 1 points, 0.500 at worst" in lines
    assert any(line.endswith("of 14 points, 0.941 at worst (at most 0.70, 0.95)") for line in lines)
    assert (
        "kimi-k2.5-tp8 int4: eager 247.7 us at M = 1, 0.62 of the matmul rate under load at M = 8192, "
        "workspace 3 MiB"
    ) in lines
    assert lines[-1] == "not measured: vllm, kimi-k2.5-tp8 int8, M = 8: ValueError: no act-order"


def test_the_table_of_the_readme_has_all_shapes_and_numbers_of_tokens() -> None:
    points = met()
    points[0] = replace(points[0], measured={"ours": Measured(burst_us=17.26)})
    lines = markdown_lines([*points, point("kimi-k2.5-tp8", 1, over_floor=7, over_peer=1, form="int8")])
    assert len(lines) == 2 + 4 * len(SHAPES)
    assert {line.count("|") for line in lines} == {16}
    assert lines[0] == f"| tokens | {' | '.join(map(str, ALL_TOKENS))} |"
    assert lines[2].startswith("| **kimi-k2.5-tp8**: ours | 17.3 | 188 |")
    assert lines[3].startswith("| best peer | – | 200 |")
    assert lines[4].startswith("| ours × floor | 0.17 | 1.88 |")
    assert lines[5].startswith("| ours ÷ best peer | – | 0.94 |")


def test_of_several_files_the_last_that_measured_a_point_counts(tmp_path: Path) -> None:
    paths = [tmp_path / "a.json", tmp_path / "b.json"]
    for path, over_floor in zip(paths, (2.0, 1.5), strict=True):
        one = point("qwen3-30b-a3b", 8, over_floor=over_floor, over_peer=0.5)
        Results(machine={}, protocol={}, ceilings={}, points=[one]).write(path)
    arguments = [*map(str, paths), "--kind", "sustained"]
    result = CliRunner().invoke(layer_report.main, arguments, catch_exceptions=False)
    assert "ours over the floor, int4, sustained: measured/asked for" in result.output
    assert "1.65/1.40*" in result.output
    assert "2.20" not in result.output
    result = CliRunner().invoke(layer_report.main, [str(paths[0]), "--markdown"], catch_exceptions=False)
    assert "| **qwen3-30b-a3b**: ours | 200 |" in result.output
