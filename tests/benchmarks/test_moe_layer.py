"""A run without a device: fake times, real layers on the CPU, real files."""

import re
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import layer_bench
import moe_layer
import pytest
import torch
from click.testing import CliRunner
from layer_bench import MAKERS, Bench, Run, reason_of
from layer_problems import FORMATS, FULL_SWEEP, SHAPES, Case, Ceilings, LayerShape
from layer_timing import Protocol, TimeLimit, Timing

from marlin_moe import fused_marlin_moe
from marlin_moe.cli.bench_results import Measured, Point, Results

SMALL = LayerShape(name="small", num_experts=4, top_k=2, hidden_size=128, intermediate_size=64, group_size=32)
CASE = Case(shape=SMALL, form=FORMATS["int4"], tokens=(1, 5))
CEILINGS = Ceilings(copy_bytes_per_s=1e12, read_bytes_per_s=1e12, matmul_flops_per_s=1e15)


class OnCpu:
    """The reference backend; `scale` makes it wrong."""

    def __init__(self, layers, *, scale: float = 1.0, most_tokens: int = 100) -> None:
        self.layers, self.scale, self.most_tokens = layers, scale, most_tokens

    def __call__(self, index, x, routing):
        if len(x) > self.most_tokens:
            raise RuntimeError(f"{len(x)} tokens are too many\nmore of it")
        return fused_marlin_moe(x, self.layers[index], routing.weights, routing.ids) * self.scale


def no_such_library(layers, rows):
    raise FileNotFoundError("kernels.so: not there")


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    made = {
        "right": lambda layers, rows: OnCpu(layers),
        "wrong": lambda layers, rows: OnCpu(layers, scale=1.1, most_tokens=3),
        "absent": no_such_library,
    }
    for name, maker in made.items():
        monkeypatch.setitem(MAKERS, name, maker)

    class Called:
        def __init__(self, all_layers, *, layers: int, protocol: Protocol) -> None:
            all_layers()

    monkeypatch.setattr(layer_bench, "Replays", Called)
    monkeypatch.setattr(layer_bench, "eager_us", lambda all_layers, layers, samples: 7.0)
    monkeypatch.setattr(
        layer_bench,
        "measure",
        lambda graphs, protocol: {name: Timing(burst_us=2.0, sustained_us=3.0) for name in graphs},
    )
    return Run(
        names=tuple(made),
        eager_tokens=(1,),
        layers=2,
        check=True,
        patience_s=60,
        protocol=Protocol(),
        ceilings=CEILINGS,
        device="cpu",
    )


def test_a_point_holds_times_errors_and_refusals(run: Run) -> None:
    torch.manual_seed(0)
    bench = Bench.build(run, CASE)
    point = bench.point(1)
    right, wrong = point.measured["right"], point.measured["wrong"]
    assert (right.burst_us, right.sustained_us, right.eager_us, right.refused) == (2.0, 3.0, 7.0, None)
    assert right.relative_error is not None
    assert right.relative_error < 5e-3
    assert right.difference == 0
    assert right.matmul_fraction == round(2 * 2 * 3 * 128 * 64 / 3e-6 / 1e15, 4)
    assert wrong.relative_error == pytest.approx(0.1, rel=0.1)
    assert wrong.difference == pytest.approx(0.1, rel=0.1)
    assert point.measured["absent"] == Measured(refused="FileNotFoundError: kernels.so: not there")
    assert (point.layers, point.active_experts, point.tokens) == (2, 2.0, 1)

    later = bench.point(5)
    assert later.measured["wrong"] == Measured(refused="RuntimeError: 5 tokens are too many")
    assert later.measured["right"].eager_us is None
    assert bench.refused.keys() == {"absent"}, "a refusal at one point is none at the next"


class Fails:
    """An implementation that stops in the given way, as a wrong assertion of a library or full memory do."""

    def __init__(self, error: Exception | None) -> None:
        self.error = error

    def __call__(self, index, x, routing):
        if self.error is not None:
            raise self.error
        raise AssertionError  # as a bare assert does


def test_what_fails_costs_no_other_its_figures(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MAKERS, "full", lambda layers, rows: Fails(torch.OutOfMemoryError("no room")))
    monkeypatch.setitem(MAKERS, "assert", lambda layers, rows: Fails(None))
    bench = Bench.build(replace(run, names=("full", "assert", "right", "wrong")), CASE)
    measured = bench.point(1).measured
    assert measured["full"] == Measured(refused="OutOfMemoryError: no room")
    said = measured["assert"].refused
    assert said is not None
    assert re.fullmatch(r"AssertionError: test_moe_layer.py:\d+: raise AssertionError.*", said)
    assert measured["right"].difference == 0, (
        "the first that gives an output is what others are compared with"
    )
    assert measured["wrong"].burst_us == 2.0
    assert measured["wrong"].difference == pytest.approx(0.1, rel=0.1)


def test_a_lost_device_ends_the_run_and_no_other_error_does(monkeypatch: pytest.MonkeyPatch) -> None:
    error = RuntimeError("CUDA error: an illegal memory access was encountered")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    assert reason_of(error, "cuda").startswith("RuntimeError: CUDA error")

    def lost() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "synchronize", lost)
    with pytest.raises(RuntimeError) as caught:
        reason_of(error, "cuda")
    assert caught.value is error


def empty_results() -> Results:
    return Results(machine={"device": "none"}, protocol={}, ceilings={})


def test_results_are_written_after_every_point(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "new folder" / "results.json"
    results = empty_results()
    counted = []
    point = Bench.point

    def stopped(self: Bench, tokens: int) -> Point:
        if tokens == 5:
            counted.append(len(Results.read(path).points))
            raise KeyboardInterrupt
        return point(self, tokens)

    monkeypatch.setattr(Bench, "point", stopped)
    with pytest.raises(KeyboardInterrupt):
        moe_layer.measure_cases(run, [CASE], results, path, TimeLimit(None))
    assert counted == [1]
    assert [entry.tokens for entry in Results.read(path).points] == [1]
    printed = capsys.readouterr().out
    assert "small int4: us a layer in burst, 2 layers" in printed
    assert "absent: FileNotFoundError" in printed
    assert moe_layer.wrong_results(results, {("small", "int4", 1)}) == [
        "small int4 M=1: wrong is off by 1.0e-01"
    ]
    assert moe_layer.wrong_results(results, set()) == []


def test_no_point_begins_that_would_not_end_in_time(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    point = Bench.point

    def slow(self: Bench, tokens: int) -> Point:
        now[0] += tokens
        return point(self, tokens)

    monkeypatch.setattr(Bench, "point", slow)
    cases = [replace(CASE, tokens=(1, 2, 4, 8)), replace(CASE, form=FORMATS["int8"], tokens=(1, 16))]
    results = empty_results()
    measured = moe_layer.measure_cases(run, cases, results, tmp_path / "r.json", TimeLimit(14.0))
    # After 1 + 2 + 4 s eight more would be too many; of the next case the first is tried, the second not.
    assert measured == {
        ("small", "int4", 1),
        ("small", "int4", 2),
        ("small", "int4", 4),
        ("small", "int8", 1),
    }
    assert "# 4 of 6 points in 8 s; --missing measures the others" in capsys.readouterr().out

    left = moe_layer.missing_cases(cases, results, ["right", "wrong"])
    assert left == [replace(CASE, tokens=(8,)), replace(cases[1], tokens=(16,))]
    assert moe_layer.missing_cases(cases, results, ["right", "another"]) == cases


@pytest.fixture
def whole_run(run: Run, monkeypatch: pytest.MonkeyPatch) -> Run:
    """`moe_layer.main` on the CPU, with one small case as the whole sweep."""
    monkeypatch.setattr(moe_layer, "Run", partial(Run, device="cpu"))
    monkeypatch.setattr(moe_layer, "FULL_SWEEP", [replace(CASE, shape=replace(SMALL, name="qwen3-30b-a3b"))])
    monkeypatch.setattr(
        moe_layer, "machine", lambda commit: {"device": "none", "torch": "2", "commit": commit}
    )
    monkeypatch.setattr(moe_layer, "measure_ceilings", lambda: CEILINGS)
    monkeypatch.setitem(MAKERS, "ours", MAKERS["right"])
    monkeypatch.setitem(MAKERS, "vllm", MAKERS["right"])
    monkeypatch.setitem(MAKERS, "humming", MAKERS["absent"])
    return run


def test_the_whole_sweep_in_two_runs(whole_run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "results.json"
    monkeypatch.setattr(moe_layer, "warm_all", lambda peers, cases, limit_s: iter([f"{peers} {limit_s:.0f}"]))
    arguments = ["--all", "--check", "--layers", "2", "--out", str(out), "--missing"]
    first = CliRunner().invoke(
        moe_layer.main,
        [*arguments, "--commit", "a", "--time-limit", "1000", "--warm"],
        catch_exceptions=False,
    )
    assert first.exit_code == 0
    assert "# compiled for ['vllm', 'humming'] 1000" in first.output
    assert "# 2 of 2 points in" in first.output
    assert "ours over the floor, int4, burst: measured/asked for (* missed)" in first.output
    assert (
        "not measured: humming, qwen3-30b-a3b int4, M = 1, 5: FileNotFoundError: kernels.so: not there"
        in first.output
    )
    found = Results.read(out)
    assert [point.tokens for point in found.points] == [1, 5]
    assert found.points[0].measured["ours"].eager_us == 7.0

    again = CliRunner().invoke(moe_layer.main, [*arguments, "--commit", "b"], catch_exceptions=False)
    assert again.exit_code == 0
    assert "# 0 of 0 points in" in again.output
    replaced = [argument for argument in arguments if argument != "--missing"]
    again = CliRunner().invoke(
        moe_layer.main, [*replaced, "--append", "--commit", "b"], catch_exceptions=False
    )
    assert again.exit_code == 0
    found = Results.read(out)
    assert [point.tokens for point in found.points] == [1, 5]
    assert found.machine["commit"] == "a, b"


def test_a_wrong_result_fails_the_run_and_is_in_the_file(whole_run: Run, tmp_path: Path) -> None:
    out = tmp_path / "results.json"
    arguments = ["--all", "--check", "--layers", "2", "--out", str(out), "--impl", "ours,wrong"]
    result = CliRunner().invoke(moe_layer.main, arguments, catch_exceptions=False)
    assert result.exit_code == 1
    assert "qwen3-30b-a3b int4 M=1: wrong is off by 1.0e-01" in result.output
    assert len(Results.read(out).points) == 2


def test_the_full_sweep_covers_what_is_asked_for() -> None:
    points = {(case.shape.name, case.form.name, tokens) for case in FULL_SWEEP for tokens in case.tokens}
    assert {key for key in points if key[1] == "int4"} == {
        (shape, "int4", 2**power) for shape in SHAPES for power in range(14)
    }
    assert len(points) == 5 * 14 + 2 * 3 * 4


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--shapes", "llama"], "expected parts of kimi-k2.5-tp8"),
        (["--formats", "int3"], "expected some of int4, int8"),
        (["--impl", "ours,marlin"], "got 'marlin'"),
        (["--tokens", "1,x"], "expected numbers with commas"),
        (["--tokens", "0"], "expected numbers from 1 on"),
        (["--all", "--tokens", "1"], "--all: expected no --formats and no --tokens"),
    ],
)
def test_wrong_flags(arguments: list[str], text: str) -> None:
    result = CliRunner().invoke(moe_layer.main, arguments)
    assert result.exit_code == 2
    assert text in " ".join(result.output.split())


def test_parts_of_names_choose_shapes() -> None:
    assert moe_layer.containing(None, None, "tp8,qwen3") == (
        "kimi-k2.5-tp8",
        "qwen3-30b-a3b",
        "deepseek-v3-tp8",
    )
    assert moe_layer.containing(None, None, ",".join(SHAPES)) == tuple(SHAPES)
