"""A packed checkpoint that somebody forged: right hashes of wrong values, pipes for files."""

from __future__ import annotations

import copy
import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from checkpoints import CheckpointSpec, write_checkpoint
from marlin_moe import (
    MarlinMoEError,
    Shard,
    inspect_checkpoint,
    load_layers,
    repack_checkpoint,
    unpack_checkpoint,
    verify_checkpoint,
)
from marlin_moe.repack.errors import PackedError
from mutants import WEIRD, config_places
from mutations import edit_json
from packed_files import MANIFEST, rehash, write_manifest

VALUES = [*(value for value in WEIRD if value != "\ud800"), 0, 1, 8, 64, "I32", "BF16", [], [2, 64]]


def forged(manifest: dict[str, Any], chance: random.Random) -> dict[str, Any]:
    """One or two values of a manifest are others, or missing."""
    manifest = copy.deepcopy(manifest)
    for _ in range(chance.choice([1, 1, 2])):
        path = chance.choice(config_places(manifest))
        holder: Any = manifest
        for key in path[:-1]:
            holder = holder[key]
        if chance.randrange(4):
            holder[path[-1]] = chance.choice(VALUES)
        else:
            del holder[path[-1]]
    return manifest


@pytest.mark.filterwarnings("ignore::marlin_moe.MarlinMoEWarning")
@pytest.mark.parametrize("seed", range(4))
def test_a_forged_manifest_is_no_crash(tmp_path: Path, seed: int) -> None:
    """Whatever it says with a right hash of itself, what is raised is an error of this package."""
    order = {"actorder": "group", "symmetric": False, "bias": True} if seed % 2 else {}
    spec = CheckpointSpec(num_experts=2, hidden_size=64, intermediate_size=64, top_k=1, **order)
    source, packed = tmp_path / "source", tmp_path / "packed"
    write_checkpoint(source, spec)
    repack_checkpoint(source, packed)
    original = json.loads((packed / MANIFEST).read_text())
    chance, refused = random.Random(seed), 0
    for number in range(60):
        manifest = forged(original, chance)
        write_manifest(packed, manifest)
        for use in (
            load_layers,
            lambda path: load_layers(path, tp=Shard(0, 2), check=True),
            inspect_checkpoint,
            lambda path: verify_checkpoint(path, source),
            lambda path, number=number: unpack_checkpoint(path, tmp_path / f"again-{number}"),
        ):
            try:
                use(packed)
            except MarlinMoEError:
                refused += 1
            except Exception as error:
                changed = {key: value for key, value in manifest.items() if value != original.get(key)}
                raise AssertionError(f"seed {seed}, number {number}: {error!r} for {changed}") from error
    assert refused > 100


@pytest.mark.parametrize("name", [MANIFEST, "source_files.json", "source_config.json", "config.json"])
def test_a_pipe_in_a_files_place_is_not_waited_for(own_pair: Callable[[str], Any], name: str) -> None:
    packed = own_pair("plain").packed
    (packed / name).unlink()
    os.mkfifo(packed / name)
    with pytest.raises(MarlinMoEError, match=name):
        load_layers(packed)
    with pytest.raises(MarlinMoEError, match=name):
        inspect_checkpoint(packed)
    if name == MANIFEST:
        with pytest.raises(MarlinMoEError, match=name):
            verify_checkpoint(packed)
    else:
        assert name in str(verify_checkpoint(packed).problems[0])


def test_a_config_of_another_version_is_refused_without_check(own_pair: Callable[[str], Any]) -> None:
    packed = own_pair("plain").packed
    edit_json(packed / "config.json", lambda config: config["quantization_config"].update(version=2))
    with pytest.raises(
        PackedError, match=r"config\.json: expected \d+ bytes|expected quantization_config .*'version': 1"
    ):
        load_layers(packed)
    rehash(packed)
    with pytest.raises(
        PackedError, match=r"config\.json: expected quantization_config .*'version': 1.*got .*2"
    ):
        load_layers(packed)


def test_small_files_are_always_hashed(own_pair: Callable[[str], Any]) -> None:
    packed = own_pair("plain").packed
    text = (packed / "config.json").read_text()
    (packed / "config.json").write_text(text.replace("num_experts_per_tok", "num_experts_per_toc"))
    with pytest.raises(PackedError, match=r"config\.json: bytes: expected xxh3-128"):
        load_layers(packed)
