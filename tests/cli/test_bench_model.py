"""`marlin-moe bench model`: a whole run at small sizes on a CPU."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from folders import golden
from marlin_moe.bench import model_bench
from marlin_moe.bench.model_plot import save_model_plot
from marlin_moe.bench.model_results import ModelResults, ModelRun
from marlin_moe.cli.main import main

SMALL = ("--device", "cpu", "--prompts", "4,12", "--batches", "2", "--context", "4", "--steps", "2")


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["bench", "model", *map(str, arguments)])


def test_a_random_model_is_written_measured_and_removed(tmp_path: Path) -> None:
    folder = tmp_path / "work"
    folder.mkdir()
    options = ("--shape", "small", "--layers", 1, "--repeats", 1, "--folder", folder)
    files = ("-o", tmp_path / "r.json", "--plot", tmp_path / "r.svg")
    result = invoke(*options, *SMALL, *files)
    assert result.exit_code == 0, result.output
    assert not list(folder.iterdir())
    assert "measuring per-call\n" in result.stderr
    assert result.stdout.startswith("small: Qwen3MoeForCausalLM, 1 layers, ")
    content = json.loads((tmp_path / "r.json").read_text())
    assert [run["variant"] for run in content["runs"]] == [
        "persistent",
        "per-call",
        "reference",
        "dequantized",
    ]
    for run in content["runs"]:
        assert run["ttft_ms"].keys() == {"4", "12"}
        assert run["token_ms"].keys() == {"2"}
        assert run["skipped"] == {"graph 2": "no graphs on cpu"}
        assert all(ms > 0 for ms in run["ttft_ms"].values())
    assert [run["same_tokens"] for run in content["runs"][:3]] == [True] * 3
    assert (tmp_path / "r.svg").read_text().startswith("<?xml")


def test_its_results_are_drawn_again(tmp_path: Path) -> None:
    run = ModelRun(variant="persistent", ttft_ms={128: 30.0, 2048: 60.0}, token_ms={1: 20.0})
    checkpoint = {"name": "m", "model": "M", "layers": 1, "dtype": "bfloat16", "packed_bytes": 1}
    results = ModelResults(machine={}, checkpoint=checkpoint, protocol={}, runs=[run])
    results.write(tmp_path / "r.json")
    save_model_plot(results, tmp_path / "first.svg")

    def plot(*files: str) -> Result:
        paths = [str(tmp_path / name) for name in files]
        return CliRunner().invoke(main, ["bench", "plot", *paths, "-o", str(tmp_path / "again.svg")])

    result = plot("r.json")
    assert result.exit_code == 0, result.output
    assert result.stdout.endswith("again.svg: 2 panels, 2 lines, 3 points\n")
    assert (tmp_path / "again.svg").read_bytes() == (tmp_path / "first.svg").read_bytes()
    twice = plot("r.json", "r.json")
    assert twice.exit_code == 1
    assert "expected one file where it is of a model benchmark" in twice.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_the_random_model_is_removed_when_a_signal_ends_the_run(
    number: signal.Signals, tmp_path: Path
) -> None:
    options = (
        "--shape",
        "small",
        "--folder",
        str(tmp_path),
        *SMALL,
        "--prompts",
        "512",
        "--repeats",
        "100000",
    )
    command = [sys.executable, "-m", "marlin_moe.cli", "bench", "model", *options]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        said = iter(process.stderr)
        assert any("measuring persistent" in line for line in said)
        assert list(tmp_path.iterdir())
        process.send_signal(number)
        assert f"error: interrupted by {number.name}\n" in [*said]
        assert process.wait(timeout=60) == 128 + number
    assert not list(tmp_path.iterdir())


def test_a_checkpoint_and_one_variant_as_json() -> None:
    options = ("--repeats", 1, "--variant", "reference", "--dtype", "float32", "--json")
    result = invoke(golden("mixtral-w4a16-g128"), *SMALL, *options, "--prompts", "4,300")
    assert result.exit_code == 0, result.output
    content = json.loads(result.stdout)
    assert content["checkpoint"]["model"] == "MixtralForCausalLM"
    assert content["checkpoint"]["dtype"] == "float32"
    (run,) = content["runs"]
    assert run["skipped"]["ttft 300"] == "more than 256 tokens"
    assert run["ttft_ms"].keys() == {"4"}


NO_ADDRESSES = 10**15
"""Tokens whose ids alone are more than a process can address."""


def test_what_cannot_run_is_a_reason_and_the_rest_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put = model_bench.put_variant

    def refuse(model: Any, name: str) -> str | None:
        if name == "per-call":
            raise ValueError("not this model\nmore")
        return put(model, name)

    monkeypatch.setattr(model_bench, "put_variant", refuse)
    sizes = ("--prompts", f"4,{NO_ADDRESSES}", "--batches", f"2,{NO_ADDRESSES}")
    options = ("--repeats", 1, "--variant", "persistent", "--variant", "per-call", "--variant", "dequantized")
    result = invoke("--shape", "small", *SMALL, *sizes, *options, "-o", tmp_path / "r.json")
    assert result.exit_code == 0, result.output
    assert "per-call, all: ValueError: not this model\n" in result.stdout
    runs = {run.variant: run for run in ModelResults.read(tmp_path / "r.json").runs}
    assert not runs["per-call"].ttft_ms
    for run in (runs["persistent"], runs["dequantized"]):
        assert (run.ttft_ms.keys(), run.token_ms.keys()) == ({4}, {2})
        for point in (f"ttft {NO_ADDRESSES}", f"token {NO_ADDRESSES}"):
            assert run.skipped[point].startswith("RuntimeError: "), run.skipped


def test_what_begins_after_the_time_limit_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second a prompt, of which the third of the first variant is the last that begins in time."""
    now = [0.0]

    def ttft(model: Any, tokens: int, repeats: int) -> float:
        now[0] += 1.0
        return 1000.0

    monkeypatch.setattr(model_bench, "ttft_ms", ttft)
    monkeypatch.setattr(model_bench.time, "monotonic", lambda: now[0])
    options = ("--variant", "persistent", "--variant", "reference", "--time-limit", 2, "--prompts", "1,2,3,4")
    result = invoke("--shape", "small", *SMALL, *options, "-o", tmp_path / "r.json")
    assert result.exit_code == 0, result.output
    persistent, reference = ModelResults.read(tmp_path / "r.json").runs
    assert persistent.ttft_ms.keys() == {1, 2, 3}
    assert persistent.skipped["ttft 4"] == persistent.skipped["token 2"] == "no time left"
    assert reference.skipped == {"all": "no time left"}


def test_nothing_measured_is_a_failure() -> None:
    options = ("--prompts", NO_ADDRESSES, "--batches", NO_ADDRESSES, "--variant", "persistent")
    result = invoke("--shape", "small", *SMALL, *options)
    assert result.exit_code == 1
    assert f"persistent, ttft {NO_ADDRESSES}: RuntimeError: " in result.stdout
    assert "error: results: expected at least one measured variant, got none" in result.stderr


def test_nothing_is_written_without_transformers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    result = invoke("--shape", "small", "--folder", tmp_path, *SMALL)
    assert result.exit_code == 1
    assert "pip install 'marlin-moe[transformers]'" in result.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--prompts", "4,x"), "expected whole numbers from 1 on, between commas, got '4,x'"),
        (("--batches", "0"), "got '0'"),
        (("--time-limit", "0"), "0.0 is not in the range x>0"),
        (("--variant", "fast"), "'fast' is not one of"),
        (("m", "--shape", "small"), "--shape: expected no PATH beside it, because it is of the random model"),
        (("m", "--shape", "qwen3-30b-a3b"), "got 'm'. Leave out one of the two"),
        (("m", "--layers", "1"), "--layers: expected no PATH beside it"),
        (("m", "--folder", "."), "--folder: expected no PATH beside it"),
    ],
)
def test_wrong_flags(options: tuple[str, ...], message: str) -> None:
    result = invoke("--device", "cpu", *options)
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split())


def test_a_picture_that_cannot_be_drawn() -> None:
    result = invoke("--device", "cpu", "--plot", "r.gif")
    assert result.exit_code == 2
    assert "--plot: expected a name that ends in .svg or .png" in result.stderr


@pytest.mark.parametrize("option", ["-o", "--plot"])
def test_a_file_that_cannot_be_written_is_said_before_anything_is_measured(
    option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "folder.svg").mkdir()

    def refused(path: Path) -> str:
        result = invoke("--shape", "small", *SMALL, option, path)
        assert (result.exit_code, result.stdout) == (1, "")
        assert "measuring" not in result.stderr
        return result.stderr

    missing = tmp_path / "none" / "r.svg"
    expected = f"{missing}: expected a file that can be written, got no folder {missing.parent}"
    assert expected in refused(missing)
    assert "is a directory" in refused(tmp_path / "folder.svg")
    monkeypatch.setattr(os, "access", lambda path, mode: not mode & os.W_OK)
    assert f"got a read-only {tmp_path}" in refused(tmp_path / "r.svg")
    (tmp_path / "r.svg").touch()
    assert "is not writable" in refused(tmp_path / "r.svg")


def test_a_picture_without_matplotlib_is_said_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = invoke("--shape", "small", *SMALL, "--plot", tmp_path / "r.svg")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "pip install 'marlin-moe[bench]'" in result.stderr
    assert "measuring" not in result.stderr


def test_a_path_that_is_none() -> None:
    result = invoke("nowhere", *SMALL)
    assert result.exit_code == 1
    assert "nowhere: expected a checkpoint directory" in result.stderr
