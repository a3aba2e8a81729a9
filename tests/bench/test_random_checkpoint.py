"""The random checkpoint is one that the library reads and transformers can run."""

from __future__ import annotations

import json
from collections import namedtuple
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from marlin_moe import MarlinMoEError, inspect_checkpoint, load_layers
from marlin_moe.bench import random_checkpoint
from marlin_moe.bench.random_checkpoint import SHAPES, ModelShape, write_checkpoint
from marlin_moe.integrations.transformers import load_model

SMALL = SHAPES["small"]


@pytest.mark.parametrize("shape", [SMALL, replace(SMALL, packed_attention=False)])
def test_the_model_runs_and_layers_are_alike(shape: ModelShape, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "model", shape, 5)
    assert len(list((tmp_path / "model").glob("*.safetensors"))) == 2
    layers = list(load_layers(tmp_path / "model").values())
    assert len(layers) == 5
    assert torch.equal(layers[0].w13.qweight, layers[4].w13.qweight)
    w13, w2 = layers[0].dequantize([0])
    assert 0.01 < float(w13.std()) < 0.04
    assert 0.01 < float(w2.std()) < 0.04
    logits = load_model(tmp_path / "model")(torch.arange(6)[None]).logits
    assert logits.isfinite().all()
    assert logits.std() > 0.01


def test_what_it_says_is_what_it_writes(tmp_path: Path) -> None:
    said = write_checkpoint(tmp_path / "model", SMALL)
    index = json.loads((tmp_path / "model" / "model.safetensors.index.json").read_text())
    written = 0
    for name in sorted(set(index["weight_map"].values())):
        with safe_open(tmp_path / "model" / name, framework="pt") as file:
            written += sum(file.get_tensor(key).nbytes for key in file.keys())  # noqa: SIM118
    assert said == written == index["metadata"]["total_size"]


def test_sizes_of_qwen3_30b_a3b() -> None:
    """The published model: 30.5 billion parameters, of which 48 x 128 experts have 29.0."""
    shape = SHAPES["qwen3-30b-a3b"]
    of_layer = sum(n * k for _, n, k in shape.linears())
    total = shape.layers * (of_layer + shape.num_experts * shape.hidden_size)
    assert total + 2 * shape.vocabulary * shape.hidden_size == pytest.approx(30.5e9, rel=2e-3)


def test_no_room_is_said_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(random_checkpoint.shutil, "disk_usage", lambda path: usage(1000, 0, 1000))
    with pytest.raises(MarlinMoEError, match=r"expected room for a checkpoint of 0\.0 GB.*fewer layers"):
        write_checkpoint(tmp_path / "deep" / "model", SMALL)
    assert not (tmp_path / "deep").exists()


def test_inspect_takes_it(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "model", SMALL)
    assert inspect_checkpoint(tmp_path / "model").as_dict()
