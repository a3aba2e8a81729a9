"""A run without a device: fake times, real layers on the CPU, real files."""

from pathlib import Path

import layer_bench
import moe_layer
import pytest
import torch
from click.testing import CliRunner
from layer_bench import MAKERS, Bench, Run, reason_of
from layer_problems import FORMATS, SHAPES, Ceilings, LayerShape
from layer_timing import Protocol, Timing

from marlin_moe import fused_marlin_moe
from marlin_moe.cli.bench_results import Measured, Point, Results

SMALL = LayerShape(name="small", num_experts=4, top_k=2, hidden_size=128, intermediate_size=64, group_size=32)


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
        tokens=(1, 5),
        eager_tokens=(1,),
        layers=2,
        check=True,
        patience_s=60,
        protocol=Protocol(),
        ceilings=Ceilings(copy_bytes_per_s=1e12, read_bytes_per_s=1e12, matmul_flops_per_s=1e15),
        device="cpu",
    )


def test_a_point_holds_times_errors_and_refusals(run: Run) -> None:
    torch.manual_seed(0)
    bench = Bench.build(run, SMALL, FORMATS["int4"])
    point = bench.point(1)
    right, wrong = point.measured["right"], point.measured["wrong"]
    assert (right.burst_us, right.sustained_us, right.eager_us, right.refused) == (2.0, 3.0, 7.0, None)
    assert right.relative_error is not None
    assert right.relative_error < 5e-3
    assert right.difference == 0
    assert wrong.relative_error == pytest.approx(0.1, rel=0.1)
    assert wrong.difference == pytest.approx(0.1, rel=0.1)
    assert point.measured["absent"] == Measured(refused="FileNotFoundError: kernels.so: not there")
    assert (point.layers, point.active_experts, point.tokens) == (2, 2.0, 1)

    later = bench.point(5)
    assert later.measured["wrong"] == Measured(refused="RuntimeError: 5 tokens are too many")
    assert later.measured["right"].eager_us is None
    assert bench.refused.keys() == {"absent"}, "a refusal at one point is none at the next"


def test_a_lost_device_ends_the_run() -> None:
    with pytest.raises(RuntimeError, match="illegal memory access"):
        reason_of(RuntimeError("CUDA error: an illegal memory access was encountered"))


def test_results_are_written_after_every_point(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "new folder" / "results.json"
    results = Results(machine={"device": "none"}, protocol={}, ceilings={})
    counted = []
    point = Bench.point

    def stopped(self: Bench, tokens: int) -> Point:
        if tokens == 5:
            counted.append(len(Results.read(path).points))
            raise KeyboardInterrupt
        return point(self, tokens)

    monkeypatch.setattr(Bench, "point", stopped)
    with pytest.raises(KeyboardInterrupt):
        moe_layer.measure_shape(run, SMALL, FORMATS["int4"], results, path)
    assert counted == [1]
    assert [entry.tokens for entry in Results.read(path).points] == [1]
    printed = capsys.readouterr().out
    assert "small int4: us a layer in burst, 2 layers" in printed
    assert "absent: FileNotFoundError" in printed
    assert moe_layer.wrong_results(results) == ["small int4 M=1: wrong is off by 1.0e-01"]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--shapes", "llama"], "expected parts of kimi-k2.5-tp8"),
        (["--formats", "int3"], "expected some of int4, int8"),
        (["--impl", "ours,marlin"], "got 'marlin'"),
        (["--tokens", "1,x"], "expected numbers with commas"),
        (["--tokens", "0"], "expected numbers from 1 on"),
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
