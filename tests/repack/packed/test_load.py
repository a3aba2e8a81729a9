"""A layer from a packed checkpoint is the layer from its source, byte for byte, on every rank."""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoint_spec import CheckpointSpec
from checkpoints import make_source, write_checkpoint, write_source
from marlin_moe import (
    MarlinMoEError,
    MarlinMoELayer,
    MarlinMoEWarning,
    Shard,
    load_layers,
    process_weights,
    repack_checkpoint,
    update_weights_,
)
from marlin_moe.repack.errors import ExpertsError, PackedError
from packed_files import flip_packed_bit

FACTS = ("num_global_experts", "intermediate_size", "gated", "tp", "ep", "top_k", "max_tokens", "recipe")


def load(path: Path, **arguments: Any) -> dict[str, MarlinMoELayer] | str:
    """The layers, or the text of the error."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", MarlinMoEWarning)
        try:
            return load_layers(path, **arguments)
        except MarlinMoEError as error:
            return f"{type(error).__name__}: {error}"


def assert_same(packed: MarlinMoELayer, source: MarlinMoELayer, where: str) -> None:
    mine, theirs = dict(packed.tensors()), dict(source.tensors())
    assert list(mine) == list(theirs), where
    for name, tensor in theirs.items():
        assert mine[name].dtype == tensor.dtype, f"{where} {name}"
        assert mine[name].is_contiguous(), f"{where} {name}"
        if not torch.equal(mine[name], tensor):
            first = torch.nonzero(mine[name] != tensor)[0].tolist()
            pytest.fail(f"{where} {name} at {first}: {mine[name][tuple(first)]} != {tensor[tuple(first)]}")
    for fact in FACTS:
        assert getattr(packed, fact) == getattr(source, fact), f"{where} {fact}"
    assert packed.w13.format == source.w13.format, where
    assert packed.w2.format == source.w2.format, where
    assert packed.workspace is not None, where


def compare(packed: Path, source: Path, **arguments: Any) -> bool:
    """Compare every layer; whether there was one, or both refused with one text."""
    mine, theirs = load(packed, **arguments), load(source, **arguments)
    if isinstance(theirs, str) or isinstance(mine, str):
        assert mine == theirs
        return False
    assert list(mine) == list(theirs)
    for name, layer in theirs.items():
        assert_same(mine[name], layer, f"{arguments} {name}")
    return True


@pytest.mark.parametrize("tp", [1, 2, 3, 4, 8])
def test_every_tp_rank_has_the_bytes_of_the_source(pair: Any, tp: int) -> None:
    loaded = [compare(pair.packed, pair.source, tp=Shard(rank, tp)) for rank in range(tp)]
    assert all(loaded) or not any(loaded)
    assert tp != 1 or all(loaded)


@pytest.mark.parametrize("ep", [2, 4])
def test_every_tp_and_ep_rank_has_the_bytes_of_the_source(pair: Any, ep: int) -> None:
    for tp in (1, 2):
        for rank in range(ep):
            compare(pair.packed, pair.source, tp=Shard(tp - 1, tp), ep=Shard(rank, ep))
    assert compare(pair.packed, pair.source, ep=Shard(ep - 1, ep))


@pytest.mark.parametrize(
    ("name", "tp"),
    [
        ("plain", 4),
        ("one group per rank", 8),
        ("group cut by the slice", 2),
        ("one scale per column", 4),
        ("padded", 3),
        ("act-order", 2),
    ],
)
def test_a_slice_on_64_columns_is_cut_without_a_warning(
    pair_of: Callable[[str], Any], name: str, tp: int
) -> None:
    pair = pair_of(name)
    last = load_layers(pair.packed, tp=Shard(tp - 1, tp))
    assert all(layer.tp == Shard(tp - 1, tp) for layer in last.values())


def test_a_slice_that_is_no_cut_is_said_to_be_slower(pair_of: Callable[[str], Any]) -> None:
    pair = pair_of("padded")
    with pytest.warns(MarlinMoEWarning, match=r"slices of 32 .*tp=3.* packed again.*slower"):
        load_layers(pair.packed, tp=Shard(0, 3))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["act-order", "padded", "one scale per column"])
def test_scales_are_converted_as_from_the_source(
    pair_of: Callable[[str], Any], name: str, dtype: torch.dtype
) -> None:
    pair = pair_of(name)
    for tp in (1, 3 if name == "padded" else 2):
        assert compare(pair.packed, pair.source, dtype=dtype, tp=Shard(0, tp))


def test_a_conversion_that_loses_values_is_the_same_error(tmp_path: Path) -> None:
    source = make_source(CheckpointSpec())
    name = next(n for n in source.tensors if n.endswith("2.down_proj.weight_scale"))
    source.tensors[name][0, 0] = 1e30
    write_source(tmp_path / "source", source)
    repack_checkpoint(tmp_path / "source", tmp_path / "packed")
    assert not compare(tmp_path / "packed", tmp_path / "source", dtype=torch.float16)
    assert "1 that overflow" in load(tmp_path / "packed", dtype=torch.float16)


def test_only_top_k_and_max_tokens(pair_of: Callable[[str], Any]) -> None:
    pair = pair_of("plain")
    names = list(load_layers(pair.packed))
    assert names == ["model.layers.0.mlp.experts", "model.layers.1.mlp.experts"]
    layers = load_layers(pair.packed, only=names[1:], top_k=3, max_tokens=7)
    assert list(layers) == names[1:]
    assert (layers[names[1]].top_k, layers[names[1]].max_tokens) == (3, 7)
    assert load_layers(pair.packed)[names[0]].top_k == 2
    with pytest.raises(ExpertsError, match=r"only: .*model\.layers\.0\.mlp\.experts.*got nothing\.there"):
        load_layers(pair.packed, only=["nothing.there"])


def test_dead_experts_have_to_be_accepted_at_every_step(tmp_path: Path) -> None:
    source = make_source(CheckpointSpec())
    name = next(n for n in source.tensors if n.endswith("2.up_proj.weight_scale"))
    source.tensors[name].zero_()
    write_source(tmp_path / "source", source)
    with pytest.raises(ExpertsError, match=r"2\.up_proj\.weight_scale.*nothing but zeros"):
        repack_checkpoint(tmp_path / "source", tmp_path / "packed")
    assert not (tmp_path / "packed").exists()
    repack_checkpoint(tmp_path / "source", tmp_path / "packed", allow_dead_experts=True)
    with pytest.raises(ExpertsError, match=r"1 projections.*2\.up"):
        load_layers(tmp_path / "packed")
    assert compare(tmp_path / "packed", tmp_path / "source", allow_dead_experts=True)


def test_a_packed_layer_takes_new_weights_in_the_sources_layout(pair_of: Callable[[str], Any]) -> None:
    module = "model.layers.0.mlp.experts"
    tp = Shard(1, 2)
    layer = load_layers(pair_of("one group per rank").packed, only=[module], tp=tp)[module]
    places = {name: tensor.data_ptr() for name, tensor in layer.tensors()}
    spec = CheckpointSpec(intermediate_size=512, group_size=64, symmetric=False, seed=1)
    new = make_source(spec).expert_tensors(module)
    fresh = process_weights(new, scheme=layer.recipe.scheme, tp=tp)
    before = layer.w13.qweight.clone()
    update_weights_(layer, new)
    assert not torch.equal(layer.w13.qweight, before)
    for name, tensor in layer.tensors():
        assert tensor.data_ptr() == places[name], name
        assert torch.equal(tensor, dict(fresh.tensors())[name]), name


PEAK = """
import resource, sys, threading, time
import torch
torch.set_num_threads(1)
from marlin_moe import Shard, load_layers

def private_bytes():
    fields = dict(line.split(":") for line in open("/proc/self/smaps_rollup") if ":" in line)
    return 1024 * int(fields["Private_Dirty"].split()[0])

peak, stop = [0], threading.Event()
def watch():
    while not stop.is_set():
        peak[0] = max(peak[0], private_bytes())
        time.sleep(0.001)

path, tp, block = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
import marlin_moe.repack.packed.load as load
load.BLOCK_BYTES = block
load_layers(sys.argv[4], tp=Shard(tp - 1, tp))
start = private_bytes()
watcher = threading.Thread(target=watch)
watcher.start()
layers = load_layers(path, tp=Shard(tp - 1, tp))
stop.set()
watcher.join()
print(peak[0] - start, sum(layer.nbytes for layer in layers.values()))
"""


@pytest.mark.parametrize("tp", [1, 2])
def test_private_memory_is_the_layer_and_one_block(
    tmp_path: Path, pair_of: Callable[[str], Any], tp: int
) -> None:
    spec = CheckpointSpec(
        num_experts=16, hidden_size=1024, intermediate_size=1024, group_size=128, extras=("router",)
    )
    write_checkpoint(tmp_path / "source", spec)
    repack_checkpoint(tmp_path / "source", tmp_path / "packed")
    block = 4 << 20
    small = pair_of("plain").packed  # loaded before the measure, so that imports do not count
    script = [sys.executable, "-c", PEAK, str(tmp_path / "packed"), str(tp), str(block), str(small)]
    result = subprocess.run(script, capture_output=True, text=True, check=False, timeout=300)
    assert result.returncode == 0, result.stderr
    peak, layer = map(int, result.stdout.split())
    assert layer > 12 << 20
    assert peak < layer + 2 * block, f"peak {peak} bytes for a layer of {layer} and blocks of {block}"


@pytest.mark.parametrize("name", ["scales", "qweight"])
def test_a_flipped_bit_is_found_with_check(own_pair: Callable[[str], Any], name: str) -> None:
    packed = own_pair("act-order").packed
    tensor = f"model.layers.0.mlp.experts.w2.{name}"
    flip_packed_bit(packed, tensor)
    load_layers(packed)
    with pytest.raises(PackedError, match=rf"experts-0\.safetensors: {tensor}: expected xxh3-128"):
        load_layers(packed, check=True)
