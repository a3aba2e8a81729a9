"""`marlin-moe doctor`, and what it finds."""

import json
import os
import re
from importlib import metadata
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result

from marlin_moe.cli import machine
from marlin_moe.cli.machine import examine_machine
from marlin_moe.cli.main import main
from marlin_moe.kernels.backends.choose import BACKENDS
from marlin_moe.repack.native.path import SWITCH, load_extension


def doctor(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["doctor", *arguments])


@pytest.fixture(autouse=True)
def no_switch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in (SWITCH, "MARLIN_MOE_JIT"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("MARLIN_MOE_CACHE", str(tmp_path / "cache"))


def test_the_report_names_this_machine() -> None:
    report = examine_machine()
    assert report.ok
    assert (report.torch, report.threads) == (str(torch.__version__), torch.get_num_threads())
    versions = {package.name: package.version for package in report.packages if package.extra is None}
    assert versions["compressed-tensors"] == metadata.version("compressed-tensors")
    assert {"torch", "safetensors", "xxhash", "click", "rich"} <= versions.keys()
    assert {package.extra for package in report.packages} == {
        None,
        "bench",
        "cuda",
        "hub",
        "transformers",
        "triton",
    }
    rows = 8192 * 8
    assert report.sample_workspace_bytes.keys() == BACKENDS.keys()
    assert report.sample_workspace_bytes["reference"] > rows * 4 * (2 * 768 + 768 + 2048)
    for backend in ("cuda", "triton"):
        assert rows * 2 * (768 + 2048) < report.sample_workspace_bytes[backend] < rows * 3 * (768 + 2048)


def test_every_device_has_every_backends_verdict() -> None:
    report = examine_machine()
    assert report.devices[0].name == "cpu"
    for device in report.devices:
        assert [verdict.backend for verdict in device.backends] == list(BACKENDS)
    assert len(report.devices) == 1 + (torch.cuda.device_count() if torch.cuda.is_available() else 0)
    assert (report.no_cuda_because is None) == (len(report.devices) > 1)


def test_a_rejecting_backend_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BACKENDS["reference"], "reason_against", lambda problem: "of the weather")
    result = doctor()
    assert "backend reference: rejected, because of the weather" in result.stdout


@pytest.mark.skipif(isinstance(load_extension(), str), reason="the C extension was not built")
def test_the_repacking_loop_is_named() -> None:
    variants = load_extension().variants()  # type: ignore[union-attr]
    assert f"C ({variants[0]})" in doctor().stdout
    assert examine_machine().native.variants == tuple(variants)


def test_the_torch_path_is_never_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SWITCH, "0")
    result = doctor()
    assert result.exit_code == 0
    assert f"torch operations ({SWITCH}=0)" in result.stdout


def test_an_installation_that_cannot_work_is_a_failed_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SWITCH, "yes")
    result = doctor("--json")
    assert result.exit_code == 1
    report = json.loads(result.stdout)
    assert (report["ok"], report["native"]["path"]) == (False, None)
    assert f"{SWITCH}: expected 0" in report["problems"][0]
    assert result.stderr.splitlines()[-1].startswith("error: this installation")


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    requirements = [
        "torch>=2.11",
        "no-such-package>=1",
        "no-such-extra>=1; extra == 'cuda'",
        "x; extra == 'dev'",
    ]
    monkeypatch.setattr(machine.metadata, "requires", lambda name: requirements)
    result = doctor()
    assert result.exit_code == 1
    assert "no-such-package MISSING" in result.stdout
    assert "missing no-such-extra: pip install 'marlin-moe[cuda]'" in result.stdout
    assert "no-such-package: expected to be installed" in result.stderr
    assert "no-such-extra: expected" not in result.stderr


def test_the_kernel_cache_is_counted(tmp_path: Path) -> None:
    folder = tmp_path / "cache" / "cubin" / "v1"
    assert f"kernel cache  {folder}: 0 kernels, 0 B; usable" in doctor().stdout
    assert not (tmp_path / "cache").exists(), "looking makes no folder"
    folder.mkdir(mode=0o700, parents=True)
    for name, nbytes in (("ab" * 32, 1500), ("cd" * 32, 500), (f".{'ab' * 32}-1-{'0f' * 8}", 70)):
        (folder / name).write_bytes(bytes(nbytes))
    (folder / ("ef" * 32)).mkdir()
    assert f"kernel cache  {folder}: 2 kernels, 2.00 kB; usable" in doctor().stdout
    assert len(os.listdir(folder)) == 4
    kernels = json.loads(doctor("--json").stdout)["kernels"]
    assert kernels["cache"] == {
        "path": str(folder),
        "entries": 2,
        "nbytes": 2000,
        "reason": None,
        "problem": None,
    }
    assert kernels["compiling"] is True


@pytest.mark.parametrize("below", ["", "/below"])
def test_a_cache_that_cannot_be_written_is_said_and_no_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, below: str
) -> None:
    """Kernels are then compiled anew in every process."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("MARLIN_MOE_CACHE", f"{tmp_path}/file{below}")
    result = doctor()
    assert (result.exit_code, result.stderr) == (0, "")
    assert re.search(r"kernel cache  .*/cubin/v1: 0 kernels, 0 B; none can be stored: .+", result.stdout)
    monkeypatch.setenv("MARLIN_MOE_CACHE", "/proc/x")
    assert "none can be stored: /proc: No such file or directory" in doctor().stdout


def test_a_cache_that_is_refused_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(0o777)
    for value, said in (
        (str(tmp_path / "cache"), "mode 0777"),
        ("cache", "absolute path"),
        ("~nosuchuser/cache", "no home is known"),
    ):
        monkeypatch.setenv("MARLIN_MOE_CACHE", value)
        result = doctor()
        assert result.exit_code == 1
        assert said in result.stderr
        assert re.search(rf"kernel cache  refused: .*{said}", result.stdout)


def test_a_variable_that_says_something_impossible_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MARLIN_MOE_JIT", "bogus")
    result = doctor()
    assert result.exit_code == 1
    assert "MARLIN_MOE_JIT: expected" in result.stderr
    assert "compiling     not known (MARLIN_MOE_JIT=bogus)" in result.stdout


def test_what_the_variable_says_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "compiling     allowed (MARLIN_MOE_JIT is not set)" in doctor().stdout
    monkeypatch.setenv("MARLIN_MOE_JIT", "forbid")
    result = doctor()
    assert result.exit_code == 0
    assert "compiling     forbidden (MARLIN_MOE_JIT=forbid)" in result.stdout


def test_json_is_the_report() -> None:
    result = doctor("--json")
    assert (result.exit_code, result.stderr) == (0, "")
    assert json.loads(result.stdout) == json.loads(json.dumps(examine_machine().as_dict()))
