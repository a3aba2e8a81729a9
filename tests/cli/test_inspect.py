"""`marlin-moe inspect`: what is printed where, and the exit code."""

import json
import warnings
from pathlib import Path

from click.testing import CliRunner, Result

from checkpoints import write_checkpoint
from marlin_moe.cli.main import main
from marlin_moe.cli.output import bytes_text
from marlin_moe.repack.inspect import inspect_checkpoint
from mutations import drop_tensor, replace_tensor


def inspect(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, ["inspect", *map(str, arguments)])


def row_of(result: Result, module: str) -> list[str]:
    """The cells of a layer's row: columns are two spaces apart or more."""
    line = next(line for line in result.stdout.splitlines() if line.startswith(module))
    return [cell.strip() for cell in line.split("  ") if cell.strip()]


def test_each_layer_has_a_row(tmp_path: Path) -> None:
    write_checkpoint(
        tmp_path, num_layers=2, hidden_size=256, intermediate_size=96, symmetric=False, down_bits=8
    )
    result = inspect(tmp_path)
    assert (result.exit_code, result.stderr) == (0, "")
    report = inspect_checkpoint(tmp_path)
    assert report.layers[0].source_bytes != report.layers[0].packed_bytes
    now, packed = (bytes_text(n) for n in (report.layers[1].source_bytes, report.layers[1].packed_bytes))
    module, *cells = row_of(result, "model.layers.1.mlp.experts")
    assert module == "model.layers.1.mlp.experts"
    assert cells == [
        *("4", "256", "96, padded to 128", "w13 4, w2 8", "32", "yes", "no", "BF16"),
        *(now, packed),
    ]
    assert "TP sizes that work: 1, 3; EP up to 4" in result.stdout
    assert "split over" not in result.stdout


def test_a_split_that_fits_is_shown(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, intermediate_size=192, group_size=64)
    result = inspect(tmp_path, "--tp", 2, "--ep", "4")
    assert result.exit_code == 0, result.stderr
    split = result.stdout[result.stdout.index("split over tp=2, ep=4") :]
    row = next(line for line in split.splitlines() if line.startswith("model.layers.0.mlp.experts"))
    assert "  yes         1  96, padded to 128  32, regrouped from 64  " in row


def test_a_split_that_does_not_fit_is_a_failed_check(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, intermediate_size=96)
    result = inspect(tmp_path, "--tp", "2")
    assert result.exit_code == 1
    assert "TP sizes that work: 1, 3" in result.stdout
    assert "TP sizes that work: 1, 3." in result.stderr
    assert result.stderr.splitlines()[-1] == (
        f"error: {tmp_path}: 1 of 1 layer cannot be repacked or split as asked"
    )


def test_a_refused_layer_has_its_row_and_the_others_theirs(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path, num_layers=3)
    drop_tensor(tmp_path, f"{source.spec.module(1)}.0.down_proj.weight_packed")
    result = inspect(tmp_path)
    assert result.exit_code == 1
    assert row_of(result, source.spec.module(1)) == [source.spec.module(1), "refused"]
    assert row_of(result, source.spec.module(2))[1] == "4"
    places = [result.stdout.index(source.spec.module(layer)) for layer in range(3)]
    assert places == sorted(places)
    assert f"{source.spec.module(1)}.0.down_proj.weight_packed" in result.stderr
    assert result.stderr.splitlines()[-1].endswith("1 of 3 layers cannot be repacked or split as asked")


def test_json_is_the_report_and_nothing_else(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path, hidden_size=192)
    drop_tensor(tmp_path, f"{source.spec.module(0)}.0.down_proj.weight_packed")
    result = inspect(tmp_path, "--json")
    assert result.exit_code == 1
    report = inspect_checkpoint(tmp_path).as_dict()
    assert json.loads(result.stdout) == json.loads(json.dumps(report))
    assert report["ok"] is False
    assert report["refused"][0]["module"] == source.spec.module(0)


def test_warnings_go_to_stderr(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, hidden_size=192)
    name = "model.layers.0.mlp.experts.3.up_proj"
    replace_tensor(tmp_path, f"{name}.weight_scale", lambda scales: scales * 0)
    result = inspect(tmp_path)
    assert result.exit_code == 0
    assert "warning:" not in result.stdout
    first, second = result.stderr.splitlines()
    assert first.startswith("warning: ")
    assert name in first
    assert second.startswith("warning: hidden size 192")


def test_plain_experts_are_listed_as_carried_over(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, extras=("mtp",))
    result = inspect(tmp_path)
    assert result.exit_code == 0
    carried = result.stdout[result.stdout.index("carried over unchanged") :]
    assert "model.layers.1.mlp.experts: 4 experts as plain BF16" in carried


def test_a_missing_directory_is_bad_input(tmp_path: Path) -> None:
    result = inspect(tmp_path / "absent")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith(f"error: {tmp_path / 'absent'}: expected a checkpoint directory")


def test_a_size_below_one_is_a_wrong_flag(tmp_path: Path) -> None:
    assert inspect(tmp_path, "--tp", "0").exit_code == 2


def test_the_method_and_widened_bits_are_shown(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "a", storage="gptq", symmetric=False, wrapped_zeros=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = inspect(tmp_path / "a")
    assert result.stdout.splitlines()[0].startswith(f"{tmp_path / 'a'}: checkpoint, gptq, ")
    assert "8, widened from 4" in row_of(result, "model.layers.0.mlp.experts")
    write_checkpoint(tmp_path / "b", storage="fused")
    result = inspect(tmp_path / "b")
    assert "stored as 3-D tensors that hold all experts: 1 layer" in result.stdout
    assert row_of(result, "model.layers.0.mlp.experts")[4] == "4"
