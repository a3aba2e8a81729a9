"""verify finds whatever differs from the manifest and from the source, and says where."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch

from marlin_moe import load_layers, verify_checkpoint
from marlin_moe.repack.errors import CheckpointError, PackedError
from mutations import edit_json, flip_bit, flip_tensor_bit, truncate
from packed_files import MANIFEST, contents, flip_packed_bit, rehash, write_manifest

EXPERTS = "model.layers.0.mlp.experts"


class Watch:
    """`Progress` that adds up."""

    total = done = 0

    def start(self, total_bytes: int) -> None:
        self.total = total_bytes

    def advance(self, done_bytes: int, what: str) -> None:
        assert done_bytes >= 0
        assert what
        self.done += done_bytes


def test_a_packed_checkpoint_is_its_source(pair: Any) -> None:
    watch = Watch()
    report = verify_checkpoint(pair.packed, pair.source, progress=watch, block_bytes=1)
    assert report.ok, "\n".join(map(str, report.problems))
    assert (report.problem_count, report.unlisted_files) == (0, ())
    assert report.source_tensors > 0
    assert report.tensors > 0
    assert watch.done == watch.total > report.source_bytes
    assert json.dumps(report.as_dict())


def test_without_a_source_nothing_is_compared_with_it(pair_of: Callable[[str], Any]) -> None:
    report = verify_checkpoint(pair_of("plain").packed)
    assert (report.ok, report.source, report.source_tensors, report.source_bytes) == (True, None, 0, 0)


@pytest.mark.parametrize("byte", [0, -1, 777])
@pytest.mark.parametrize(
    "name",
    [
        f"{EXPERTS}.w13.qweight",
        f"{EXPERTS}.w13.scales",
        f"{EXPERTS}.w2.zero_points",
        f"{EXPERTS}.w13.sort_order",
        f"{EXPERTS}.intermediate_order",
        f"{EXPERTS}.w2.bias",
        "model.layers.0.self_attn.q_proj.weight",
    ],
)
def test_a_flipped_bit_is_named(own_pair: Callable[[str], Any], name: str, byte: int) -> None:
    pair = own_pair("act-order")
    flip_packed_bit(pair.packed, name, byte=byte)
    report = verify_checkpoint(pair.packed)
    assert not report.ok
    assert [problem.name for problem in report.problems] == [name]
    assert "expected xxh3-128" in report.problems[0].message


def test_a_forged_weight_is_found_by_its_value(own_pair: Callable[[str], Any]) -> None:
    """The hashes are made right again, so only the comparison with the source can tell."""
    pair = own_pair("plain")
    name = f"{EXPERTS}.w2.scales"
    flip_packed_bit(pair.packed, name, byte=2 * 128 * 8 + 3, bit=2)  # expert 1, second column of the order
    rehash(pair.packed)
    assert verify_checkpoint(pair.packed).ok
    report = verify_checkpoint(pair.packed, pair.source)
    assert report.problem_count == 1
    problem = report.problems[0]
    assert (problem.name, problem.expert) == (f"{EXPERTS}.1.down_proj.weight_scale", 1)
    assert problem.coordinate == (8, 0)  # grouped order: position 1 holds column 8
    theirs = load_layers(pair.source)[EXPERTS].w2.scales
    mine = load_layers(pair.packed)[EXPERTS].w2.scales
    place = tuple(torch.nonzero(theirs != mine)[0].tolist())
    assert place == (1, 0, 1)
    assert (problem.packed_value, problem.source_value) == (mine[place].item(), theirs[place].item())
    assert problem.differing == 1


@pytest.mark.parametrize("field", ["w13.qweight", "w2.qweight", "w2.scales"])
def test_forged_padding_is_found(own_pair: Callable[[str], Any], field: str) -> None:
    pair = own_pair("padded")
    flip_packed_bit(pair.packed, f"{EXPERTS}.{field}", byte=-1)
    rehash(pair.packed)
    report = verify_checkpoint(pair.packed, pair.source)
    assert [problem.expert for problem in report.problems] == [3]
    assert "expected zeros beyond the intermediate size 96" in report.problems[0].message


def test_a_changed_source_is_found(own_pair: Callable[[str], Any]) -> None:
    pair = own_pair("plain")
    flip_tensor_bit(pair.source, f"{EXPERTS}.2.up_proj.weight_packed", position=5)
    flip_tensor_bit(pair.source, "model.layers.1.self_attn.q_proj.weight", position=-1)
    report = verify_checkpoint(pair.packed, pair.source)
    found = {problem.name: problem for problem in report.problems}
    assert set(found) == {f"{EXPERTS}.2.up_proj.weight_packed", "model.layers.1.self_attn.q_proj.weight"}
    assert found[f"{EXPERTS}.2.up_proj.weight_packed"].coordinate == (0, 1)
    assert found["model.layers.1.self_attn.q_proj.weight"].source_value is not None


def test_another_source_is_found(pair_of: Callable[[str], Any]) -> None:
    report = verify_checkpoint(pair_of("plain").packed, pair_of("padded").source)
    assert not report.ok
    assert "expected the source that it was packed from" in report.problems[0].message


def test_what_was_carried_over_is_compared_side_by_side(
    own_pair: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from marlin_moe.repack.checkpoint import Checkpoint
    from marlin_moe.repack.packed import compare
    from marlin_moe.repack.packed.reader import PackedCheckpoint
    from marlin_moe.repack.progress import NoProgress

    pair = own_pair("bits of w2 differ")
    monkeypatch.setattr(compare, "PART_BYTES", 1)  # a part for every tensor
    with PackedCheckpoint(pair.packed) as packed, Checkpoint(pair.source) as source:
        tasks = compare.source_comparisons(packed, source, NoProgress(), block_bytes=1)
        experts = tuple(f"{layer.module}." for layer in packed.manifest.layers)
        carried = [name for name in source.tensors if not name.startswith(experts)]
        assert len(tasks) == len(experts) + len(carried) + 4  # fingerprint, config, names, companions
    for name in (carried[0], carried[-1]):
        flip_tensor_bit(pair.source, name, 1)
    report = verify_checkpoint(pair.packed, pair.source, workers=3)
    assert {problem.name for problem in report.problems} == {carried[0], carried[-1]}
    assert report.problem_count == 2


def test_changed_companions_are_found(own_pair: Callable[[str], Any]) -> None:
    pair = own_pair("plain")
    (pair.source / "generation_config.json").write_text("{}")
    (pair.source / "tokenizer.json").write_text("{}")
    names = {problem.name for problem in verify_checkpoint(pair.packed, pair.source).problems}
    assert names == {"generation_config.json", "tokenizer.json"}


@pytest.mark.parametrize(
    "name",
    [
        "experts-1.safetensors",
        "rest-00001.safetensors",
        "config.json",
        "source_config.json",
        "source_files.json",
    ],
)
def test_a_missing_or_truncated_file_is_named(own_pair: Callable[[str], Any], name: str) -> None:
    pair = own_pair("plain")
    truncate(pair.packed / name, 1)
    for found in ("bytes as marlin_moe.json says, got", "got nothing there"):
        report = verify_checkpoint(pair.packed, pair.source)
        assert [problem.name for problem in report.problems][:1] == [name]
        assert found in report.problems[0].message
        with pytest.raises(PackedError, match=name.replace(".", r"\.")):
            load_layers(pair.packed)
        (pair.packed / name).unlink(missing_ok=True)


def test_every_byte_of_every_file_is_covered(own_pair: Callable[[str], Any]) -> None:
    """Headers, their padding, configs and index too: one bit anywhere is found."""
    pair = own_pair("plain")
    for name, content in contents(pair.packed).items():
        for position in {0, 7, 9, len(content) // 2, 4000 % len(content), len(content) - 1}:
            flip_bit(pair.packed / name, position, bit=1)
            try:
                found = not verify_checkpoint(pair.packed).ok
            except PackedError:
                found = name == MANIFEST or name == "config.json"
            assert found, f"{name} at {position}"
            (pair.packed / name).write_bytes(content)
    assert verify_checkpoint(pair.packed).ok


def test_extra_files(own_pair: Callable[[str], Any]) -> None:
    pair = own_pair("plain")
    (pair.packed / "README.md").write_text("mine")
    report = verify_checkpoint(pair.packed)
    assert (report.ok, report.unlisted_files) == (True, ("README.md",))
    (pair.packed / "experts-7.safetensors").write_bytes(b"stray")
    report = verify_checkpoint(pair.packed)
    assert [problem.name for problem in report.problems] == ["experts-7.safetensors"]


def test_an_edited_manifest_is_refused(own_pair: Callable[[str], Any]) -> None:
    pair = own_pair("plain")
    manifest = json.loads((pair.packed / MANIFEST).read_text())
    edit_json(pair.packed / MANIFEST, lambda content: content["layers"][0].update(num_experts=5))
    with pytest.raises(PackedError, match=r"marlin_moe\.json: expected content of hash .* edited or damaged"):
        load_layers(pair.packed)
    manifest["layers"][0]["num_experts"] = 5
    write_manifest(pair.packed, manifest)
    with pytest.raises(
        PackedError, match=r"experts-0\.safetensors: .*w13\.qweight: expected I32 \(5, 8, 1024\)"
    ):
        load_layers(pair.packed)
    assert not verify_checkpoint(pair.packed).ok


@pytest.mark.parametrize(
    "change",
    [{"version": 2}, {"version": "1"}, {"layout": {"name": "marlin", "version": 2}}, {"layout": None}],
)
def test_another_version_is_refused_by_name(own_pair: Callable[[str], Any], change: dict[str, Any]) -> None:
    pair = own_pair("plain")
    edit_json(pair.packed / MANIFEST, lambda content: content.update(change))
    for call in (load_layers, verify_checkpoint):
        with pytest.raises(PackedError, match=r"marlin_moe\.json: expected version 1.*Install .* or repack"):
            call(pair.packed)


def test_what_is_no_packed_checkpoint_is_refused(pair_of: Callable[[str], Any]) -> None:
    pair = pair_of("plain")
    with pytest.raises(PackedError, match="expected a packed checkpoint"):
        verify_checkpoint(pair.source)
    with pytest.raises(PackedError, match="expected a packed checkpoint"):
        verify_checkpoint(pair.source / "nothing")
    with pytest.raises(CheckpointError, match="nothing there"):
        verify_checkpoint(pair.packed, pair.source / "nothing")


def test_without_the_manifest_it_is_no_checkpoint(own_pair: Callable[[str], Any]) -> None:
    pair = own_pair("plain")
    (pair.packed / MANIFEST).unlink()
    for call in (load_layers, verify_checkpoint):
        with pytest.raises(PackedError, match=r"marlin_moe\.json: expected a manifest"):
            call(pair.packed)
