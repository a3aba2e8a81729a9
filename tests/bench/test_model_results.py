"""Results of a model benchmark as a file, a table and a picture."""

from __future__ import annotations

from pathlib import Path

import pytest

from marlin_moe.bench.model_plot import draw_model, save_model_plot
from marlin_moe.bench.model_results import ModelResults, ModelResultsError, ModelRun
from marlin_moe.cli.bench_model import print_model_results


@pytest.fixture
def results() -> ModelResults:
    return ModelResults(
        machine={"device": "NVIDIA H200"},
        checkpoint={
            "name": "m",
            "model": "Qwen3MoeForCausalLM",
            "layers": 48,
            "dtype": "bfloat16",
            "packed_bytes": 16_000_000_000,
        },
        protocol={"context_tokens": 128, "steps": 32, "repeats": 3, "max_tokens": 8192},
        runs=[
            ModelRun(
                variant="persistent",
                weights_bytes=17_000_000_000,
                peak_bytes=18_000_000_000,
                ttft_ms={128: 30.0, 8192: 210.5},
                token_ms={1: 20.0},
                graph_token_ms={1: 4.25},
                same_tokens=True,
            ),
            ModelRun(
                variant="reference", ttft_ms={128: 900.0}, skipped={"ttft 8192": "more than 256 tokens"}
            ),
        ],
    )


def test_they_come_back_as_they_were_written(results: ModelResults, tmp_path: Path) -> None:
    results.write(tmp_path / "r.json")
    assert ModelResults.read(tmp_path / "r.json") == results


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "expected results as JSON"),
        ("[]", r"expected 'marlin-moe model benchmark', version 1.*got 'list'"),
        ('{"format": "marlin-moe layer benchmark", "version": 1}', "got 'marlin-moe layer benchmark'"),
        ('{"format": "marlin-moe model benchmark", "version": 1, "runs": [{}]}', "got others: KeyError"),
    ],
)
def test_other_files_are_refused(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "r.json").write_text(text)
    with pytest.raises(ModelResultsError, match=message):
        ModelResults.read(tmp_path / "r.json")


def test_a_folder_that_is_not_there(results: ModelResults, tmp_path: Path) -> None:
    with pytest.raises(ModelResultsError, match="expected a file that can be written"):
        results.write(tmp_path / "none" / "r.json")
    with pytest.raises(ModelResultsError, match="expected a file that can be written"):
        save_model_plot(results, tmp_path / "none" / "r.svg")


def test_the_table(results: ModelResults, capsys: pytest.CaptureFixture[str]) -> None:
    print_model_results(results)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "m: Qwen3MoeForCausalLM, 48 layers, 16.0 GB, bfloat16, on NVIDIA H200"
    table = [line.split() for line in lines if line.startswith(("persistent ", "reference "))]
    assert table == [
        ["persistent", "30.00", "210.50", "20.00", "4.25", "18.0", "GB", "1.12"],
        ["reference", "900.00", "-", "-", "-", "-", "-"],
    ]
    assert lines[-1] == "reference, ttft 8192: more than 256 tokens"


def test_the_picture_has_a_panel_for_each_kind_and_a_line_for_each_variant(
    results: ModelResults, tmp_path: Path
) -> None:
    figure = draw_model(results)
    titles = [ax.get_title() for ax in figure.axes]
    assert titles == ["time to first token", "time per token, generate()", "time per token, CUDA graph"]
    lines = {line.get_label(): list(line.get_ydata()) for line in figure.axes[0].lines}
    assert lines == {"persistent": [30.0, 210.5], "reference": [900.0]}
    for name in ("a.svg", "b.svg"):
        save_model_plot(results, tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


def test_nothing_measured_gives_no_picture(results: ModelResults) -> None:
    results.runs[:] = [ModelRun(variant="persistent", skipped={"all": "no"})]
    with pytest.raises(ModelResultsError, match="at least one measured variant"):
        draw_model(results)
