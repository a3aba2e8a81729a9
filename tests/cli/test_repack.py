"""`marlin-moe repack`, `verify` and `unpack`: what is printed where, and the exit code."""

import json
import os
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result

from checkpoints import Source, write_checkpoint
from marlin_moe.cli.main import main
from marlin_moe.repack.inspect import inspect_checkpoint
from marlin_moe.repack.load import load_layers
from marlin_moe.repack.native.path import native_path
from mutations import drop_tensor, flip_bit, replace_tensor


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


@pytest.fixture
def source(tmp_path: Path) -> Source:
    return write_checkpoint(tmp_path / "source", num_layers=2)


@pytest.fixture
def packed(tmp_path: Path, source: Source) -> Path:
    result = run("repack", tmp_path / "source", tmp_path / "packed")
    assert result.exit_code == 0, result.stderr
    return tmp_path / "packed"


def test_repack_names_the_loop_and_sums_up(tmp_path: Path, source: Source) -> None:
    result = run("repack", tmp_path / "source", tmp_path / "packed")
    assert result.exit_code == 0
    assert result.stderr == f"repacking weights by {native_path()}\n"
    summary, advice = result.stdout.splitlines()
    assert summary.startswith(f"{tmp_path / 'packed'}: 2 layers, ")
    assert summary.endswith("B/s")
    assert advice == f"prove it: marlin-moe verify {tmp_path / 'packed'} {tmp_path / 'source'}"
    assert load_layers(tmp_path / "packed").keys() == source.layers.keys()


def test_repack_says_when_torch_does_it(
    tmp_path: Path, source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MARLIN_MOE_NATIVE", "0")
    result = run("repack", tmp_path / "source", tmp_path / "packed", "--json")
    assert result.exit_code == 0
    assert result.stderr == "repacking weights by torch operations (MARLIN_MOE_NATIVE=0)\n"
    assert json.loads(result.stdout)["native_path"] == "torch operations (MARLIN_MOE_NATIVE=0)"


def test_repack_as_json(tmp_path: Path, source: Source) -> None:
    result = run("repack", tmp_path / "source", tmp_path / "packed", "--json")
    report = json.loads(result.stdout)
    assert report["layers"] == 2
    assert report["packed_bytes"] == sum(f.stat().st_size for f in (tmp_path / "packed").iterdir())


def test_repack_again_has_nothing_to_do(tmp_path: Path, source: Source, packed: Path) -> None:
    arguments = ("repack", tmp_path / "source", packed)
    result = run(*arguments)
    assert result.exit_code == 0, result.stderr
    summary, advice = result.stdout.splitlines()
    assert summary.startswith(f"{packed}: already complete: 2 layers, ")
    assert summary.endswith(f" of {tmp_path / 'source'}")
    assert advice == f"prove it: marlin-moe verify {packed} {tmp_path / 'source'}"
    assert json.loads(run(*arguments, "--json").stdout)["already_complete"] is True
    write_checkpoint(tmp_path / "other", num_layers=1)
    result = run("repack", tmp_path / "other", packed)
    assert (result.exit_code, result.stdout) == (1, "")
    assert "differs from it" in result.stderr


def test_a_refused_source_leaves_nothing_that_loads(tmp_path: Path, source: Source) -> None:
    drop_tensor(tmp_path / "source", f"{source.spec.module(1)}.3.gate_proj.weight_scale")
    result = run("repack", tmp_path / "source", tmp_path / "packed")
    assert (result.exit_code, result.stdout) == (1, "")
    assert f"{source.spec.module(1)}: expected 1 tensors more" in result.stderr.splitlines()[-1]
    assert run("verify", tmp_path / "packed").exit_code == 1


def test_dead_experts_are_accepted_when_told_so(tmp_path: Path, source: Source) -> None:
    name = f"{source.spec.module(0)}.1.up_proj"
    replace_tensor(tmp_path / "source", f"{name}.weight_scale", torch.zeros_like)
    arguments = ("repack", tmp_path / "source", tmp_path / "packed")
    result = run(*arguments)
    assert result.exit_code == 1
    assert name in result.stderr
    result = run(*arguments, "--allow-dead-experts")
    assert result.exit_code == 0, result.stderr
    assert inspect_checkpoint(tmp_path / "packed").layers[0].dead_projections == (name,)


def test_links_out_of_the_directory_are_followed_when_told_so(tmp_path: Path, source: Source) -> None:
    weights = tmp_path / "source" / "model.safetensors"
    weights.rename(tmp_path / "elsewhere.safetensors")
    weights.symlink_to(tmp_path / "elsewhere.safetensors")
    arguments = (tmp_path / "source", tmp_path / "packed")
    result = run("repack", *arguments)
    assert result.exit_code == 1
    assert "elsewhere.safetensors" in result.stderr
    assert run("inspect", tmp_path / "source").exit_code == 1
    assert run("inspect", tmp_path / "source", "--follow-links").exit_code == 0
    result = run("repack", *arguments, "--follow-links")
    assert result.exit_code == 0, result.stderr


@pytest.mark.parametrize("device", ["gpu", "cpu:x", "meta"])
def test_a_device_that_is_none_is_a_wrong_flag(tmp_path: Path, source: Source, device: str) -> None:
    result = run("repack", tmp_path / "source", tmp_path / "packed", "--device", device)
    assert result.exit_code == 2
    assert device in result.stderr
    assert not (tmp_path / "packed").exists()


@pytest.mark.parametrize(
    ("rank", "devices", "expected"),
    [(None, 4, "cuda"), ("3", 4, "cuda:3"), ("3", 1, "cuda:0"), ("2", 0, "cuda:0")],
)
def test_cuda_is_a_gpu_of_each_ranks_own(
    monkeypatch: pytest.MonkeyPatch, rank: str | None, devices: int, expected: str
) -> None:
    import click

    asked = []
    monkeypatch.setattr(torch, "empty", lambda *_, device: asked.append(str(device)))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if rank is not None:
        monkeypatch.setenv("LOCAL_RANK", rank)
    option = next(p for p in main.get_command(click.Context(main), "repack").params if p.name == "device")
    context = click.Context(main)
    assert [str(option.callback(context, option, value)) for value in ("cuda", "cuda:1", "cpu")] == [
        expected,
        "cuda:1",
        "cpu",
    ]
    assert asked == [expected, "cuda:1", "cpu"]


def test_verify_sums_up_what_was_compared(tmp_path: Path, source: Source, packed: Path) -> None:
    result = run("verify", packed, tmp_path / "source")
    assert (result.exit_code, result.stderr) == (0, "")
    assert f"{packed}: 2 layers, " in result.stdout
    assert f"{tmp_path / 'source'}: {len(source.tensors)} tensors, " in result.stdout
    alone = run("verify", packed)
    assert alone.exit_code == 0
    assert "every byte is equal" not in alone.stdout
    report = json.loads(run("verify", packed, tmp_path / "source", "--json").stdout)
    assert report["ok"] is True
    assert report["source_bytes"] == sum(tensor.nbytes for tensor in source.tensors.values())


def test_verify_fails_on_a_flipped_bit(packed: Path) -> None:
    flip_bit(packed / "experts-1.safetensors", -1000)
    result = run("verify", packed, "--json")
    assert result.exit_code == 1
    report = json.loads(result.stdout)
    assert report["ok"] is False
    assert result.stderr.splitlines()[0] == f"{packed}: 1 problem:"
    assert report["problems"][0]["message"] in result.stderr
    assert result.stderr.splitlines()[-1] == f"error: {packed}: 1 problem"


def test_verify_fails_on_another_source(tmp_path: Path, packed: Path) -> None:
    other = write_checkpoint(tmp_path / "other", num_layers=2, seed=1)
    result = run("verify", packed, tmp_path / "other")
    assert (result.exit_code, result.stdout) == (1, "")
    assert other.spec.module(0) in result.stderr


def test_unpack_gives_the_source_again(tmp_path: Path, source: Source, packed: Path) -> None:
    result = run("unpack", packed, tmp_path / "again")
    assert (result.exit_code, result.stderr) == (0, "")
    assert f"{tmp_path / 'again'}: 2 layers, {len(source.tensors)} tensors, " in result.stdout
    names = sorted(os.listdir(tmp_path / "source"))
    assert sorted(os.listdir(tmp_path / "again")) == names
    for name in names:
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "source" / name).read_bytes()


def test_unpack_again_has_nothing_to_do(tmp_path: Path, source: Source, packed: Path) -> None:
    assert run("unpack", packed, tmp_path / "again").exit_code == 0
    result = run("unpack", packed, tmp_path / "again")
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.startswith(
        f"{tmp_path / 'again'}: already complete: 2 layers, {len(source.tensors)} "
    )


def test_unpack_as_json(tmp_path: Path, source: Source, packed: Path) -> None:
    report = json.loads(run("unpack", packed, tmp_path / "again", "--json").stdout)
    assert report["tensors"] == len(source.tensors)


def test_unpack_of_a_source_is_bad_input(tmp_path: Path, source: Source) -> None:
    result = run("unpack", tmp_path / "source", tmp_path / "again")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "marlin_moe.json" in result.stderr.splitlines()[-1]


def test_inspect_of_a_packed_checkpoint_says_what_it_said_of_the_source(
    tmp_path: Path, source: Source, packed: Path
) -> None:
    before = inspect_checkpoint(tmp_path / "source", tp=2, ep=2)
    after = inspect_checkpoint(packed, tp=2, ep=2)
    assert after.packed
    assert after.layers == before.layers
    assert (after.carried_tensors, after.carried_bytes) == (before.carried_tensors, before.carried_bytes)
    assert after.total_bytes == before.carried_bytes + sum(layer.packed_bytes for layer in before.layers)
    result = run("inspect", packed)
    assert result.exit_code == 0
    assert result.stdout.startswith(f"{packed}: packed checkpoint, source compressed-tensors, ")


def test_verify_follows_links_when_told_so(tmp_path: Path, source: Source, packed: Path) -> None:
    weights = tmp_path / "source" / "model.safetensors"
    (tmp_path / "elsewhere").mkdir()
    weights.rename(tmp_path / "elsewhere" / "weights")
    weights.symlink_to(tmp_path / "elsewhere" / "weights")
    refused = run("verify", packed, tmp_path / "source")
    assert refused.exit_code == 1
    assert "model.safetensors" in refused.stderr
    assert run("verify", packed, tmp_path / "source", "--follow-links").exit_code == 0


def test_verify_names_files_that_are_no_part_of_it(packed: Path) -> None:
    (packed / "notes.txt").write_text("mine")
    result = run("verify", packed)
    assert result.exit_code == 0
    assert f"{packed}: not in the manifest, so no part of the checkpoint: notes.txt" in result.stderr
    assert json.loads(run("verify", packed, "--json").stdout)["unlisted_files"] == ["notes.txt"]


def test_verify_refuses_a_packed_source(packed: Path) -> None:
    result = run("verify", packed, packed)
    assert result.exit_code == 1
    assert "expected the source checkpoint that" in result.stderr
