"""`marlin-moe demo`: every step holds, and each can fail."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

from marlin_moe.cli import demo_proof
from marlin_moe.cli.demo_call import OpCall, max_relative_error
from marlin_moe.cli.demo_checkpoint import LAYERS, exact_experts, write_demo_checkpoint
from marlin_moe.cli.demo_proof import ProofReport, prove
from marlin_moe.cli.main import main
from marlin_moe.kernels.layer import MarlinMoELayer
from marlin_moe.repack.verify import VerifyReport
from mutations import flip_bit
from oracle import moe
from oracle_folder import read_experts


def demo(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, ["demo", *map(str, arguments)])


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result]:
    directory = tmp_path_factory.mktemp("demo") / "kept"
    return directory, demo("--keep", directory)


def test_every_step_holds(kept: tuple[Path, Result]) -> None:
    directory, result = kept
    assert (result.exit_code, result.stderr) == (0, "")
    lines = result.stdout.splitlines()
    claims = [line for line in lines if line.startswith("ok   ")]
    assert len(claims) == 6 + 3 * len(LAYERS)
    assert lines[-1].startswith(f"all {len(claims)} steps hold, in ")
    assert lines[-1].endswith(f" The checkpoints are in {directory}.")


def test_the_kept_directories_are_usable(kept: tuple[Path, Result]) -> None:
    directory, _ = kept
    assert sorted(path.name for path in directory.iterdir()) == ["packed", "source", "unpacked"]
    result = CliRunner().invoke(main, ["verify", str(directory / "packed"), str(directory / "unpacked")])
    assert result.exit_code == 0, result.stderr


def test_a_directory_in_use_is_refused(kept: tuple[Path, Result]) -> None:
    directory, _ = kept
    before = sorted(directory.rglob("*"))
    result = demo("--keep", directory)
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith(f"error: {directory}: expected a new or empty directory")
    assert sorted(directory.rglob("*")) == before


def test_the_oracle_reads_the_same_weights(kept: tuple[Path, Result]) -> None:
    """compressed-tensors' decompressor in float64, and the tests' own reading of the packed words."""
    directory, _ = kept
    for layer in LAYERS:
        theirs = exact_experts(directory / "source", layer)
        own = read_experts(directory / "source", layer.module)
        assert len(theirs) == len(own)
        for (gate, up, down), expert in zip(theirs, own, strict=True):
            for found, projection in ((gate, expert.gate), (up, expert.up), (down, expert.down)):
                assert torch.equal(found, projection.dense().double())


def test_the_float64_loop_agrees_with_the_oracle(kept: tuple[Path, Result]) -> None:
    directory, _ = kept
    experts = exact_experts(directory / "source", LAYERS[0])
    call = OpCall.random(experts)
    w13 = torch.stack([torch.cat([gate, up]) for gate, up, _ in experts])
    w2 = torch.stack([down for _, _, down in experts])
    expected = moe(call.x.double(), w13, w2, call.topk_ids, call.topk_weights)
    assert max_relative_error(call.expected, expected) < 1e-12


def test_json_has_the_numbers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    result = demo("--json")
    assert (result.exit_code, result.stderr) == (0, "")
    report = json.loads(result.stdout)
    assert (report["ok"], report["directory"]) == (True, None)
    errors = [step["measured"].get("bfloat16_max_relative_error", 0.0) for step in report["steps"]]
    assert 1e-4 < max(errors) < 5e-3
    assert all(step["passed"] and step["evidence"] for step in report["steps"])


def failed(report: ProofReport) -> list[str]:
    """The claims that do not hold, without the layer's name."""
    assert not report.ok
    return [step.claim.rpartition(": ")[2] for step in report.steps if not step.passed]


def proof(directory: Path) -> ProofReport:
    return prove(directory, kept=True, say=lambda step: None)


def test_a_wrong_weight_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The highest bit of one value of the second layer is flipped wherever the packed layer is loaded."""
    true_load = demo_proof.load_layers

    def load(path: Path, **options: Any) -> dict[str, MarlinMoELayer]:
        layers = true_load(path, **options)
        if path.name == "packed" and LAYERS[1].module in layers:
            layers[LAYERS[1].module].w2.qweight[0, 0, 0] ^= 8
        return layers

    monkeypatch.setattr(demo_proof, "load_layers", load)
    assert failed(proof(tmp_path)) == [
        "loaded from the packed and from the source checkpoint, the layers are the same bytes",
        "the layer holds exactly what compressed-tensors decompresses",
        "fused_marlin_moe agrees with float64",
        "the 4 ranks of TP 2 x EP 2 add up to it",
    ]


def test_a_wrong_unpacked_byte_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    true_unpack = demo_proof.unpack_checkpoint

    def unpack(packed: Path, unpacked: Path) -> None:
        true_unpack(packed, unpacked)
        flip_bit(unpacked / "config.json", 0, 4)

    monkeypatch.setattr(demo_proof, "unpack_checkpoint", unpack)
    report = proof(tmp_path)
    assert failed(report) == ["unpacked again, every file is the source's"]
    assert "config.json differ" in [step.evidence for step in report.steps if not step.passed]


def test_a_verification_that_finds_nothing_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    true_verify: Callable[..., VerifyReport] = demo_proof.verify_checkpoint

    def verify(packed: Path, source: Path | None = None) -> VerifyReport:
        return replace(true_verify(packed, source), ok=True, problems=())

    monkeypatch.setattr(demo_proof, "verify_checkpoint", verify)
    assert failed(proof(tmp_path)) == ["one flipped bit in a copy is found"]


def test_a_failed_step_fails_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_proof, "max_relative_error", lambda found, expected: 0.25)
    result = demo()
    assert result.exit_code == 1
    assert result.stdout.count("FAIL ") == len(LAYERS)
    assert result.stderr.splitlines()[-1] == f"error: demo: 2 steps of {6 + 3 * len(LAYERS)} failed"
    assert "all " not in result.stdout.splitlines()[-1]


def test_the_checkpoint_is_the_same_every_time(tmp_path: Path) -> None:
    sizes = [write_demo_checkpoint(tmp_path / name) for name in "ab"]
    assert sizes[0] == sizes[1]
    for file in (tmp_path / "a").iterdir():
        assert file.read_bytes() == (tmp_path / "b" / file.name).read_bytes()
