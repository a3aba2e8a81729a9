"""Models are often built under a default device: what the library makes and reads lies where it says.

The meta device stands for any: a tensor that follows the default has no bytes there.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from checkpoints import write_checkpoint
from compare_layer import same_layer
from folders import checkpoint_folders
from marlin_moe import (
    MarlinMoELayer,
    Shard,
    fused_marlin_moe,
    load_layers,
    repack_checkpoint,
    unpack_checkpoint,
    verify_checkpoint,
)
from marlin_moe.repack.inspect import inspect_checkpoint

SPLITS = {"all": {}, "slice": {"tp": Shard(rank=1, size=2), "ep": Shard(rank=0, size=2)}}
FOLDERS = [path for path in checkpoint_folders() if "inter96" not in path.name]  # 96 columns allow no tp

pytestmark = pytest.mark.filterwarnings("ignore::marlin_moe.MarlinMoEWarning")


@pytest.fixture
def elsewhere() -> Iterator[torch.device]:
    with torch.device("meta") as device:
        yield device


def output(layer: MarlinMoELayer) -> torch.Tensor:
    made = torch.Generator().manual_seed(0)
    x = torch.randn(5, layer.hidden_size, generator=made, device="cpu").to(layer.scales_dtype)
    weights, ids = torch.ones(5, 1, device="cpu"), torch.arange(5, device="cpu")[:, None] % 2
    return fused_marlin_moe(x, layer, weights, ids)


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: path.name)
def test_layers_are_the_same(folder: Path, split: str) -> None:
    want = load_layers(folder, **SPLITS[split])
    outputs = {name: output(layer) for name, layer in want.items()}
    with torch.device("meta"):
        got = load_layers(folder, **SPLITS[split])
        again = {name: output(layer) for name, layer in got.items()}
        dense = {name: layer.dequantize(experts=[0]) for name, layer in got.items()}
    for name, layer in want.items():
        same_layer(got[name], layer)
        assert torch.equal(outputs[name], again[name])
        for mine, other in zip(dense[name], layer.dequantize(experts=[0]), strict=True):
            assert torch.equal(mine, other)


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: path.name)
def test_checkpoints_are_the_same(folder: Path, tmp_path: Path) -> None:
    repack_checkpoint(folder, tmp_path / "want")
    unpack_checkpoint(tmp_path / "want", tmp_path / "back")
    want = load_layers(tmp_path / "want", **SPLITS["slice"])
    with torch.device("meta"):
        inspect_checkpoint(folder)
        repack_checkpoint(folder, tmp_path / "got")
        assert verify_checkpoint(tmp_path / "got", folder).ok
        unpack_checkpoint(tmp_path / "got", tmp_path / "back too")
        got = load_layers(tmp_path / "got", **SPLITS["slice"])
    for name, layer in want.items():
        same_layer(got[name], layer)
    names = {path.name for path in (tmp_path / "back").iterdir()}
    assert names == {path.name for path in (tmp_path / "back too").iterdir()}
    for name in names:
        assert (tmp_path / "back" / name).read_bytes() == (tmp_path / "back too" / name).read_bytes(), name


def test_the_default_is_in_force(elsewhere: torch.device, tmp_path: Path) -> None:
    assert torch.empty(1).device == elsewhere
    with torch.device("cpu"):
        write_checkpoint(tmp_path)
    (layer, *_) = load_layers(tmp_path).values()
    assert layer.device == torch.device("cpu")
