"""GPTQ, AWQ and 3-D sources: packed, proved, loaded on any rank and unpacked to the same bytes."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from checkpoints import CheckpointSpec, Source, make_source, write_checkpoint, write_source
from compare_layer import equal_bytes, same_layer
from marlin_moe import (
    MarlinMoEWarning,
    Shard,
    load_layers,
    repack_checkpoint,
    unpack_checkpoint,
    verify_checkpoint,
)
from marlin_moe.repack.errors import CheckpointError, ExpertsError, PackedError
from marlin_moe.repack.packed.manifest import Manifest
from marlin_moe.repack.packed.records import LayerRecord
from marlin_moe.repack.tensor_file import TensorFile
from mutations import flip_tensor_bit
from oracle import expected_dense
from packed_files import contents, flip_packed_bit, rehash, tensor_place

EXPERTS = "model.layers.0.mlp.experts"
GPTQ = CheckpointSpec(storage="gptq", num_experts=2, hidden_size=64, intermediate_size=128)
AWQ = CheckpointSpec(storage="awq", num_experts=2, hidden_size=64, intermediate_size=128, symmetric=False)
FUSED = CheckpointSpec(storage="fused", num_experts=2, hidden_size=64, intermediate_size=128)
WIDENED = replace(GPTQ, symmetric=False, wrapped_zeros=True)
SPECS = {
    "gptq": replace(GPTQ, num_layers=2, shards=3, dtype=torch.float16, extras=("router", "mtp")),
    "gptq, act-order": replace(GPTQ, symmetric=False, actorder="group", bias=True),
    "gptq, act-order, padded": replace(GPTQ, intermediate_size=96, actorder="group"),
    "gptq, 8 bits": replace(GPTQ, bits=8, symmetric=False),
    "gptq, one scale per column": replace(GPTQ, intermediate_size=72, group_size=None, symmetric=False),
    "gptq, widened": replace(WIDENED, shards=2),
    "gptq, widened, act-order, padded": replace(WIDENED, intermediate_size=96, actorder="group"),
    "gptq_v2": replace(GPTQ, storage="gptq_v2", symmetric=False, scale_dtype=torch.float16, group_size=64),
    "gptq_v2, 8 bits": replace(GPTQ, storage="gptq_v2", bits=8, naming="mixtral", extras=("shared_experts",)),
    "awq": replace(
        AWQ, shards=2, group_size=128, hidden_size=128, intermediate_size=256, scale_dtype=torch.float16
    ),
    "awq, padded": replace(AWQ, intermediate_size=96, bias=True),
    "awq, one scale per column": replace(AWQ, group_size=None),
    "fused": replace(FUSED, symmetric=False, bias=True, shards=3, num_layers=2),
    "fused, bits of w2 differ": replace(FUSED, down_bits=8, down_group_size=64),
    "fused-nested": replace(FUSED, storage="fused-nested", intermediate_size=96, group_size=None),
    "fused-apart": replace(FUSED, storage="fused-apart", bits=8, symmetric=False, intermediate_size=96),
    "fused-transposed": replace(FUSED, storage="fused-transposed", symmetric=False, bias=True, shards=2),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """A source, what was drawn for it, and its packed checkpoint."""

    drawn: Source
    source: Path
    packed: Path


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Made]:
    """Name in SPECS -> its `Made`, made once and not to be written to."""
    done: dict[str, Made] = {}

    def get(name: str) -> Made:
        if name not in done:
            base = tmp_path_factory.mktemp("made")
            drawn = write_checkpoint(base / "source", SPECS[name])
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                repack_checkpoint(base / "source", base / "packed", block_bytes=1)
            widened = [str(w.message) for w in said if "widened from 4 to 8 bits" in str(w.message)]
            assert bool(widened) == SPECS[name].wrapped_zeros
            done[name] = Made(drawn=drawn, source=base / "source", packed=base / "packed")
        return done[name]

    return get


@pytest.fixture
def own(tmp_path: Path, made: Callable[[str], Made]) -> Callable[[str], Made]:
    """Like `made`, but a copy for this test alone."""

    def get(name: str) -> Made:
        shared = made(name)
        for part in ("source", "packed"):
            shutil.copytree(getattr(shared, part), tmp_path / part)
        return replace(shared, source=tmp_path / "source", packed=tmp_path / "packed")

    return get


every_source = pytest.mark.parametrize("name", SPECS)


@every_source
@pytest.mark.parametrize("block_bytes", [1, 1 << 30])
def test_it_is_proved_and_comes_back(
    made: Callable[[str], Made], tmp_path: Path, name: str, block_bytes: int
) -> None:
    pair = made(name)
    report = verify_checkpoint(pair.packed, pair.source, block_bytes=block_bytes)
    assert report.ok, "\n".join(map(str, report.problems))
    assert report.source_tensors == len(pair.drawn.tensors)
    unpack_checkpoint(pair.packed, tmp_path / "again", block_bytes=block_bytes)
    source, again = contents(pair.source), contents(tmp_path / "again")
    assert again.keys() == source.keys()
    assert [file for file in source if again[file] != source[file]] == []


@every_source
def test_every_rank_has_the_bytes_of_the_source(made: Callable[[str], Made], name: str) -> None:
    pair = made(name)
    group = pair.drawn.spec.down[1] or 1
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", MarlinMoEWarning)
        for tp in (1, 2, 4):
            width = pair.drawn.spec.intermediate_size // tp
            if width % group and width % 32:
                continue  # such a cut is refused, from both alike
            for ep in (1, 2):
                rank = {"tp": Shard(tp - 1, tp), "ep": Shard(ep - 1, ep)}
                theirs, mine = load_layers(pair.source, **rank), load_layers(pair.packed, **rank)
                assert list(mine) == list(theirs) == list(pair.drawn.layers)
                for module, layer in theirs.items():
                    same_layer(mine[module], layer)
                    assert mine[module].recipe == layer.recipe


@every_source
def test_the_values_are_those_that_were_drawn(made: Callable[[str], Made], name: str) -> None:
    pair = made(name)
    for module, layer in load_layers(pair.packed, check=True).items():
        assert layer.w13.format.bits == (8 if pair.drawn.spec.wrapped_zeros else pair.drawn.spec.bits)
        dense = expected_dense(pair.drawn.layers[module])
        for matrix, got, wanted in zip(("w13", "w2"), layer.dequantize(), dense, strict=True):
            equal_bytes(got, wanted, f"{module} {matrix}")


def packed_fields(packed: Path) -> list[str]:
    """The packed tensors of the first layer's experts."""
    module = Manifest.read(packed).layers[0].module
    index = json.loads((packed / "model.safetensors.index.json").read_text())["weight_map"]
    return [name for name in index if name.startswith(f"{module}.")]


@every_source
def test_a_forged_bit_is_found_by_its_value(own: Callable[[str], Made], name: str) -> None:
    """In every packed tensor, in turn in the first and the last expert; the hashes are made right again."""
    pair = own(name)
    fields = [field for field in packed_fields(pair.packed) if not field.endswith("_order")]
    for i, field in enumerate(fields):
        file, *_ = tensor_place(pair.packed, field)
        before = {place: place.read_bytes() for place in (file, pair.packed / "marlin_moe.json")}
        flip_packed_bit(pair.packed, field, byte=-(i % 2))
        rehash(pair.packed)
        problems = verify_checkpoint(pair.packed, pair.source).problems
        expert = (pair.drawn.spec.num_experts - 1) * (i % 2)
        assert [problem.expert for problem in problems] == [expert], field
        for place, content in before.items():
            place.write_bytes(content)
    assert verify_checkpoint(pair.packed, pair.source).ok
    for field in packed_fields(pair.packed):
        flip_packed_bit(pair.packed, field, byte=-1)
    assert {p.name for p in verify_checkpoint(pair.packed).problems} == set(packed_fields(pair.packed))


@every_source
def test_a_bit_of_the_source_is_found_where_it_is(own: Callable[[str], Made], name: str) -> None:
    """In every expert tensor of layer 0 that a number names, or that holds all; the last value of each."""
    pair = own(name)
    module, *_ = pair.drawn.layers
    last = pair.drawn.spec.num_experts - 1
    names = [n for n in pair.drawn.tensors if n.startswith(f"{module}.")]
    names = [
        n for n in names if pair.drawn.spec.storage.startswith("fused") or n.startswith(f"{module}.{last}.")
    ]
    assert len(names) >= 4
    for changed in names:
        flip_tensor_bit(pair.source, changed, position=-1)
    found = {problem.name: problem for problem in verify_checkpoint(pair.packed, pair.source).problems}
    assert set(found) == set(names)
    for changed, problem in found.items():
        shape = pair.drawn.tensors[changed].shape
        assert problem.expert == last
        assert problem.coordinate == tuple(size - 1 for size in shape), changed
        assert problem.differing == 1


@pytest.mark.parametrize("name", ["gptq, widened", "gptq, widened, act-order, padded"])
@pytest.mark.parametrize("field", ["w13.qweight", "w2.qweight", "w13.zero_points", "w2.zero_points"])
def test_a_widened_value_beyond_four_bits_is_found(own: Callable[[str], Made], name: str, field: str) -> None:
    """It would vanish, or spoil its neighbour, where it is narrowed again."""
    pair = own(name)
    flip_packed_bit(pair.packed, f"{EXPERTS}.{field}", byte=1, bit=7)
    rehash(pair.packed)
    (problem,) = verify_checkpoint(pair.packed, pair.source).problems
    assert (problem.expert, problem.name.startswith(f"{EXPERTS}.0.")) == (0, True)
    assert f"{problem.name}: expected values 0 .. 15, which its 4 bits store" in problem.message
    with pytest.raises(PackedError, match=r"expected values 0 \.\. 15"):
        unpack_checkpoint(pair.packed, pair.packed.parent / "again")
    assert not (pair.packed.parent / "again" / "config.json").exists()


@pytest.mark.parametrize("name", ["fused", "fused-apart", "fused-transposed"])
def test_of_3d_tensors_one_expert_at_a_time_is_read(
    made: Callable[[str], Made], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    pair, read = made(name), {}
    original = TensorFile.read_bytes

    def watched(self: TensorFile, offset: int, buffer: memoryview, *, what: str) -> None:
        read.setdefault(what, []).append(len(buffer))
        original(self, offset, buffer, what=what)

    monkeypatch.setattr(TensorFile, "read_bytes", watched)
    assert verify_checkpoint(pair.packed, pair.source, block_bytes=1).ok
    experts = pair.drawn.spec.num_experts
    for tensor, nbytes in ((n, t.nbytes) for n, t in pair.drawn.tensors.items() if n.startswith(EXPERTS)):
        assert read[tensor] == [nbytes // experts] * experts, tensor


def test_what_the_manifest_says_of_a_layer_comes_back(made: Callable[[str], Made]) -> None:
    for name, spec in SPECS.items():
        for layer in Manifest.read(made(name).packed).layers:
            assert LayerRecord.from_json(json.loads(json.dumps(layer.as_json()))) == layer
            assert (layer.fused is not None) == spec.storage.startswith("fused")
            if layer.fused is not None:
                turned = {t.transposed for t in layer.fused.tensors.values() if t.field != "bias"}
                assert turned == {spec.storage == "fused-transposed"}
                below = {k: tuple(t.shape) for k, t in made(name).drawn.expert_tensors(layer.module).items()}
                assert {t.key: t.shape for t in layer.fused.tensors.values()} == below


@pytest.mark.parametrize("name", ["gptq", "awq"])
def test_quantized_attention_is_carried_over(tmp_path: Path, name: str) -> None:
    """Attention in the tool's own format is no business of ours: its tensors stay as they are."""
    drawn = make_source(replace(SPECS[name], extras=("norms",), shards=1, num_layers=1))
    expert = f"{EXPERTS}.0.down_proj."
    copied = {n.removeprefix(expert): t for n, t in drawn.tensors.items() if n.startswith(expert)}
    attention = {f"model.layers.0.self_attn.q_proj.{field}": t.clone() for field, t in copied.items()}
    drawn.tensors.update(attention)
    write_source(tmp_path / "source", drawn)
    report = repack_checkpoint(tmp_path / "source", tmp_path / "packed")
    assert report.carried_tensors == len(drawn.other_tensors) == len(attention) + 2
    assert verify_checkpoint(tmp_path / "packed", tmp_path / "source").ok
    unpack_checkpoint(tmp_path / "packed", tmp_path / "again")
    assert contents(tmp_path / "again") == contents(tmp_path / "source")


def test_biases_that_the_packed_dtype_does_not_hold_are_refused(tmp_path: Path) -> None:
    """Packed biases have the dtype of the scales: rounded ones could not be given back."""
    spec = replace(FUSED, storage="compressed-tensors", bias=True, dtype=torch.float32)
    write_checkpoint(tmp_path / "source", replace(spec, scale_dtype=torch.bfloat16))
    with pytest.raises(ExpertsError, match=r"experts\.0 w13 bias: expected values that BF16.*got \d+ of F32"):
        repack_checkpoint(tmp_path / "source", tmp_path / "packed")
    with pytest.raises(CheckpointError, match="nothing there"):
        load_layers(tmp_path / "packed")
    write_checkpoint(tmp_path / "wide", replace(spec, dtype=torch.bfloat16, scale_dtype=torch.float32))
    repack_checkpoint(tmp_path / "wide", tmp_path / "wider")
    unpack_checkpoint(tmp_path / "wider", tmp_path / "again")
    assert contents(tmp_path / "again") == contents(tmp_path / "wide")


@pytest.mark.parametrize(
    ("packed", "source"), [("gptq", "fused"), ("fused", "gptq"), ("fused", "fused-apart")]
)
def test_a_source_stored_otherwise_is_found(made: Callable[[str], Made], packed: str, source: str) -> None:
    report = verify_checkpoint(made(packed).packed, made(source).source)
    messages = [problem.message for problem in report.problems]
    assert "expected the source that it was packed from" in messages[0]
    assert any("only tensors of the experts of" in message for message in messages)


def test_a_packed_checkpoint_is_no_source(made: Callable[[str], Made]) -> None:
    packed = made("gptq").packed
    with pytest.raises(PackedError, match=r"expected the source checkpoint that .* got one that is packed"):
        verify_checkpoint(packed, packed)
