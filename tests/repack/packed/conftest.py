"""Packed checkpoints for the tests of this folder, made once; take a copy before writing to one."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from checkpoints import CheckpointSpec, write_checkpoint
from folders import golden_folders
from marlin_moe import repack_checkpoint

# What a spec is chosen for: the slices that it makes at some TP size.
SPECS = {
    "plain": CheckpointSpec(num_layers=2, intermediate_size=256, shards=3),
    "one group per rank": CheckpointSpec(intermediate_size=512, group_size=64, symmetric=False),
    "group cut by the slice": CheckpointSpec(intermediate_size=640, group_size=128, symmetric=False),
    "one scale per column": CheckpointSpec(intermediate_size=256, group_size=None, dtype=torch.float16),
    "padded": CheckpointSpec(intermediate_size=96, bias=True),
    "padded, one scale per column": CheckpointSpec(intermediate_size=72, group_size=None, symmetric=False),
    "act-order": CheckpointSpec(intermediate_size=256, actorder="group", symmetric=False, bias=True),
    "act-order, padded": CheckpointSpec(
        num_layers=2, intermediate_size=96, actorder="group", extras=("mtp", "dense_first", "router")
    ),
    "8 bits": CheckpointSpec(intermediate_size=128, bits=8, symmetric=False, scale_dtype=torch.float16),
    "bits of w2 differ": CheckpointSpec(
        num_layers=2,
        down_bits=8,
        down_group_size=64,
        naming="mixtral",
        prefix="language_model.model.layers",
        text_config=True,
        weight_shape=torch.int32,
        extras=("attention", "embeddings", "router", "shared_experts", "mtp"),
    ),
    "no weight_shape": CheckpointSpec(weight_shape=None, actorder="group", shards=2),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A source and its packed checkpoint; not to be written to."""

    source: Path
    packed: Path


def copy_golden(folder: Path, target: Path) -> Path:
    """The checkpoint's own files, without the expected values."""
    target.mkdir(parents=True)
    for file in folder.iterdir():
        if not file.name.startswith(("expected", "golden")):
            shutil.copy(file, target / file.name)
    return target


@pytest.fixture(scope="session")
def pair_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Pair]:
    """Name of a golden folder or of an entry of SPECS -> `Pair`, made once."""
    made: dict[str, Pair] = {}
    folders = {folder.name: folder for folder in golden_folders()}

    def get(name: str) -> Pair:
        if name not in made:
            base = tmp_path_factory.mktemp("pair")
            source = base / "source"
            if name in folders:
                copy_golden(folders[name], source)
            else:
                write_checkpoint(source, SPECS[name])
            repack_checkpoint(source, base / "packed")
            made[name] = Pair(source=source, packed=base / "packed")
        return made[name]

    return get


NAMES = [*(folder.name for folder in golden_folders()), *SPECS]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test with the argument `pair` runs on every golden folder and every entry of SPECS."""
    if "pair" in metafunc.fixturenames:
        metafunc.parametrize("pair", NAMES, indirect=True)


@pytest.fixture
def pair(request: pytest.FixtureRequest, pair_of: Callable[[str], Pair]) -> Pair:
    return pair_of(request.param)


@pytest.fixture
def own_pair(tmp_path: Path, pair_of: Callable[[str], Pair]) -> Callable[[str], Pair]:
    """Like `pair_of`, but a copy for this test alone."""

    def get(name: str) -> Pair:
        shared = pair_of(name)
        for part in ("source", "packed"):
            shutil.copytree(getattr(shared, part), tmp_path / part)
        return Pair(source=tmp_path / "source", packed=tmp_path / "packed")

    return get
