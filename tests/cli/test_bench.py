"""`marlin-moe bench plot`: what is drawn, and what is refused."""

import builtins
import json
import re
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from layer_points import layer_point
from marlin_moe.cli.bench_plot import BenchPlotError, draw, lines_of, merged, plot_results
from marlin_moe.cli.bench_results import BenchResultsError, Measured, Point, Results
from marlin_moe.cli.main import main

PNG = b"\x89PNG\r\n\x1a\n"


def point(shape: str, tokens: int, form: str = "int4", **burst_us: float) -> Point:
    measured = {
        name.replace("_", "-"): Measured(burst_us=us, sustained_us=us + 1) for name, us in burst_us.items()
    }
    return layer_point(measured, shape=shape, tokens=tokens, form=form)


def results(*points: Point) -> Results:
    return Results(
        machine={"device": "NVIDIA H200"}, protocol={"samples": 11}, ceilings={}, points=list(points)
    )


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Two shapes; `humming` at one of them, and refused at the other."""
    refused = point("mixtral-8x7b", 1, ours=30.0, vllm=50.0)
    refused.measured["humming"] = Measured(refused="ValueError: no")
    written = tmp_path / "results.json"
    results(
        point("kimi-k2.5-tp8", 2, ours=15.0, vllm=40.0, humming=30.0),
        point("kimi-k2.5-tp8", 1, ours=20.0, vllm=55.0, humming=50.0),
        refused,
    ).write(written)
    return written


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["bench", "plot", *map(str, arguments)])


def test_results_come_back_as_they_were_written(path: Path) -> None:
    found = Results.read(path)
    assert [entry.tokens for entry in found.points] == [2, 1, 1]
    assert found.points[0].measured["vllm"] == Measured(burst_us=40.0, sustained_us=41.0)
    assert found.points[2].measured["humming"] == Measured(refused="ValueError: no")
    again = path.with_name("again.json")
    found.write(again)
    assert again.read_bytes() == path.read_bytes()
    assert sorted(entry.name for entry in path.parent.iterdir()) == ["again.json", "results.json"]


def test_a_panel_for_each_shape_and_a_line_for_each_implementation(path: Path, tmp_path: Path) -> None:
    output = tmp_path / "speed.svg"
    result = invoke(path, "-o", output)
    assert (result.exit_code, result.output) == (0, f"{output}: 2 panels, 5 lines, 8 points\n")
    svg = output.read_text()
    for text in ("kimi-k2.5-tp8", "mixtral-8x7b", "ours", "humming", "NVIDIA H200"):
        assert f">{text}" in svg or f"{text}<" in svg, text


def test_lines_are_time_over_floor_by_tokens(path: Path) -> None:
    panels = lines_of(merged([Results.read(path)]), "burst_us")
    assert panels["kimi-k2.5-tp8", "int4"]["humming"] == [(1, 5.0), (2, 3.0)]
    assert panels["mixtral-8x7b", "int4"].keys() == {"ours", "vllm"}
    figure = draw(panels, title="")
    assert len(figure.axes) == 2
    labels = [[text.get_text() for text in ax.get_legend().get_texts()] for ax in figure.axes]
    assert [sorted(names) for names in labels] == [["humming", "ours", "vllm"], ["ours", "vllm"]]
    drawn = {line.get_label(): line for line in figure.axes[0].get_lines()}
    assert list(drawn["ours"].get_xydata()[:, 1]) == [2.0, 1.5]
    colors = [{line.get_label(): line.get_color() for line in ax.get_lines()}["vllm"] for ax in figure.axes]
    assert colors[0] == colors[1]


def test_a_row_that_is_not_full_leaves_no_empty_panel() -> None:
    shapes = ["kimi", "qwen3", "deepseek", "mixtral"]
    figure = draw(
        lines_of([point(shape, tokens, ours=20.0) for shape in shapes for tokens in (64, 2048)], "burst_us"),
        title="",
    )
    assert [ax.get_title() for ax in figure.axes] == shapes
    assert [text.get_text() for text in figure.axes[0].get_xticklabels()] == ["64", "2k"]


SHAPES = ("kimi-k2.5-tp8", "kimi-k2.5-ep8", "qwen3-30b-a3b", "deepseek-v3-tp8", "mixtral-8x7b")


def full_sweep() -> list[Point]:
    """Five shapes at M = 1 ... 8192; ours falls from 3.1 to 1.2 times the floor, peers from above that."""
    return [
        point(shape, 2**power, ours=31.0 - 1.4 * power, vllm=60.0 - power, humming=50.0 - 2 * power)
        for shape in SHAPES
        for power in range(14)
    ]


@pytest.mark.parametrize("kind", ["burst", "sustained"])
def test_a_full_sweep_can_be_read(kind: str) -> None:
    figure = draw(lines_of(full_sweep(), f"{kind}_us"), title=kind)
    assert [ax.get_title() for ax in figure.axes] == list(SHAPES)
    figure.draw_without_rendering()
    for ax in figure.axes:
        assert sorted(line.get_label() for line in ax.get_lines() if len(line.get_xdata()) == 14) == [
            "humming",
            "ours",
            "vllm",
        ]
        labels = [label for label in ax.get_xticklabels() if label.get_text()]
        assert [label.get_text() for label in labels] == [
            "1", "2", "4", "8", "16", "32", "64", "128", "256", "512", "1k", "2k", "4k", "8k",
        ]  # fmt: skip
        boxes = [label.get_window_extent() for label in labels]
        assert all(left.x1 < right.x0 for left, right in pairwise(boxes)), "labels meet"
        heights = [label.get_window_extent() for label in ax.get_yticklabels() if label.get_text()]
        assert len(heights) >= 5
        assert all(low.y1 < high.y0 for low, high in pairwise(heights)), "labels meet"
        low, high = ax.get_ylim()
        assert low < 1 < 6 < high, "the floor and every line are inside"


def test_some_formats_only(path: Path, tmp_path: Path) -> None:
    more = tmp_path / "more.json"
    results(point("mixtral-8x7b", 1, "int8", ours=12.0), point("kimi", 1, "int4-asym", ours=1.0)).write(more)
    output = tmp_path / "speed.svg"
    result = invoke(path, more, "-o", output, "--format", "int8", "--format", "int4-asym")
    assert (result.exit_code, result.output) == (0, f"{output}: 2 panels, 2 lines, 2 points\n")
    assert ">mixtral-8x7b, int8<" in output.read_text()
    result = invoke(path, "-o", output, "--format", "int3")
    assert result.exit_code == 1
    assert result.stderr.splitlines()[-1] == (
        f"error: --format: expected one of int4, which {path} measured, got 'int3'. Choose another, or give "
        "more results."
    )


def test_results_say_how_they_compare(tmp_path: Path) -> None:
    """sqrt((10/20) * (10/10)) = 0.7071; what has no peer is in no mean."""
    written = tmp_path / "r.json"
    found = results(
        point("kimi", 1, ours=10.0, vllm=30.0, humming=20.0, ours_per_call=5.0),
        point("kimi", 2, ours=10.0, vllm=10.0),
        point("kimi", 4, ours=10.0),
        point("kimi", 1, "int8", ours=9.0, vllm=19.0),
    )
    found.write(written)
    assert json.loads(written.read_text())["summary"] == {
        "int4": {
            "burst": {"points": 2, "geometric_mean": 0.7071, "worst": 1.0},
            "sustained": {"points": 2, "geometric_mean": 0.7237, "worst": 1.0},
        },
        "int8": {
            "burst": {"points": 1, "geometric_mean": 0.4737, "worst": 0.4737},
            "sustained": {"points": 1, "geometric_mean": 0.5, "worst": 0.5},
        },
    }
    assert found.points[0].over_best_peer("burst") == 0.5
    assert found.points[0].over_best_peer("burst", "vllm") == 1.5
    assert found.points[0].over_floor("sustained") == 1.1
    assert found.points[2].over_best_peer("burst") is None
    assert found.points[0].us("burst", "sglang") is None
    assert results().summary() == {}


def test_runs_are_joined_point_by_point() -> None:
    earlier = results(point("kimi", 1, ours=10.0, vllm=20.0), point("kimi", 2, ours=11.0))
    earlier.machine.update(commit="a", driver="580")
    later = Results(
        machine={"device": "NVIDIA H200", "commit": "b", "driver": "580"},
        protocol={"samples": 5},
        ceilings={"read_bytes_per_s": 1.0},
    )
    joined = later.joined(earlier)
    joined.add(point("kimi", 1, ours=9.0))
    joined.add(point("kimi", 1, "int8", ours=12.0))
    assert [entry.key for entry in joined.points] == [
        ("kimi", "int4", 1),
        ("kimi", "int4", 2),
        ("kimi", "int8", 1),
    ]
    assert joined.points[0].measured == {"ours": Measured(burst_us=9.0, sustained_us=10.0)}
    assert joined.machine == {"device": "NVIDIA H200", "commit": "a, b", "driver": "580"}
    assert (joined.protocol, joined.ceilings) == ({"samples": 5}, {"read_bytes_per_s": 1.0})
    assert later.joined(joined).machine == joined.machine
    assert len(earlier.points) == 2
    with pytest.raises(BenchResultsError, match=r"machine.device: expected 'NVIDIA H200'.*got 'other'"):
        Results(machine={"device": "other"}, protocol={}, ceilings={}).joined(earlier)


def test_the_same_results_give_the_same_bytes(path: Path, tmp_path: Path) -> None:
    for suffix in ("svg", "png"):
        outputs = [tmp_path / f"{name}.{suffix}" for name in ("a", "b")]
        for output in outputs:
            plot_results([path], output)
        assert outputs[0].read_bytes() == outputs[1].read_bytes()
    assert (tmp_path / "a.png").read_bytes().startswith(PNG)


def test_of_several_files_the_last_counts(path: Path, tmp_path: Path) -> None:
    later = tmp_path / "later.json"
    results(point("kimi-k2.5-tp8", 1, ours=12.0), point("kimi-k2.5-tp8", 1, "int8", ours=22.0)).write(later)
    panels = lines_of(merged([Results.read(path), Results.read(later)]), "burst_us")
    assert panels["kimi-k2.5-tp8", "int4"]["ours"] == [(1, 1.2), (2, 1.5)]
    assert panels["kimi-k2.5-tp8", "int4"]["vllm"] == [(1, 5.5), (2, 4.0)]
    assert panels["kimi-k2.5-tp8", "int8"] == {"ours": [(1, 2.2)]}


def test_the_report_as_json(path: Path, tmp_path: Path) -> None:
    output = tmp_path / "speed.png"
    result = invoke(path, "-o", output, "--kind", "sustained", "--json")
    assert result.exit_code == 0
    assert json.loads(result.stdout) == {
        "output": str(output),
        "kind": "sustained",
        "panels": 2,
        "lines": 5,
        "points": 8,
    }


def test_what_was_not_measured_cannot_be_drawn(path: Path, tmp_path: Path) -> None:
    with pytest.raises(BenchPlotError, match=r"expected eager_us of at least one implementation"):
        plot_results([path], tmp_path / "speed.svg", kind="eager")
    assert not (tmp_path / "speed.svg").exists()


def changed(path: Path, changes: Mapping[str, Any]) -> None:
    """Sets values in the file; a dotted key goes down, and None as a value takes the key away."""
    report = json.loads(path.read_text())
    for key, value in changes.items():
        *way, last = [int(part) if part.isdigit() else part for part in key.split("/")]
        place = report
        for part in way:
            place = place[part]
        if value is None:
            del place[last]
        else:
            place[last] = value
    path.write_text(json.dumps(report))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"format": "other"}, "format: expected 'marlin-moe layer benchmark', because"),
        ({"version": 2}, "version: expected 1, because"),
        ({"points": None}, "points: expected list"),
        ({"points/1/tokens": None}, "points[1].tokens: expected int"),
        ({"points/0/floor_us": 0}, "points[0].floor_us: expected a positive number"),
        ({"points/0/floor_us": "fast"}, "points[0].floor_us: expected float"),
        ({"points/0/measured/vllm/burst_us": True}, "points[0].measured.vllm.burst_us: expected float"),
        ({"points/0/measured/vllm/speed": 1.0}, "points[0].measured.vllm: expected only"),
        ({"points/0/measured/vllm": []}, "points[0].measured.vllm: expected dict"),
    ],
)
def test_a_file_that_says_something_else_is_refused(path: Path, changes: dict[str, Any], text: str) -> None:
    changed(path, changes)
    with pytest.raises(BenchResultsError, match=re.escape(f"{path}: {text}")):
        Results.read(path)


@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff\xfe", b'{"format": 3}'])
def test_what_is_no_results_file_is_a_report_and_no_traceback(tmp_path: Path, content: bytes) -> None:
    bad = tmp_path / "bad.json"
    bad.write_bytes(content)
    result = invoke(bad, "-o", tmp_path / "speed.svg")
    assert result.exit_code == 1
    assert f"{bad}: " in result.stderr
    assert result.stderr.splitlines()[-1].startswith("error: ")
    assert not (tmp_path / "speed.svg").exists()


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    result = invoke(tmp_path / "nothing.json", "-o", tmp_path / "speed.svg")
    assert result.exit_code == 1
    assert (
        "nothing.json: expected results of benchmarks/moe_layer.py as JSON, got: [Errno 2]" in result.stderr
    )


def test_a_place_that_cannot_be_written_is_named(path: Path, tmp_path: Path) -> None:
    result = invoke(path, "-o", tmp_path / "no folder" / "speed.svg")
    assert result.exit_code == 1
    assert "speed.svg: expected a file that can be written" in result.stderr


def test_another_suffix_is_refused(path: Path) -> None:
    result = invoke(path, "-o", "speed.jpg")
    assert result.exit_code == 2
    assert result.stderr.splitlines()[-1] == (
        "Error: --output: expected a name that ends in .svg or .png, which can be drawn, got 'speed.jpg'."
    )


def test_without_matplotlib_the_error_says_what_to_install(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = builtins.__import__

    def refuse(name: str, *rest: Any) -> Any:
        if name.partition(".")[0] == "matplotlib":
            raise ImportError("No module named 'matplotlib'")
        return original(name, *rest)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(BenchPlotError, match=r"pip install 'marlin-moe\[bench\]'"):
        plot_results([path], tmp_path / "speed.svg")
