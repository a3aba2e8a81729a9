"""What docs/engines.md shows of graphs and streams, as it stands there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from hf_checkpoints import write_model
from pages import blocks, run_python
from tree import ROOT

pytestmark = pytest.mark.gpu


def test_graphs_and_streams_as_the_page_shows(tmp_path: Path) -> None:
    page = ROOT / "docs" / "engines.md"
    block, serving = (b for b in blocks(page) if b.language == "python")
    assert serving.gpu
    names: dict[str, Any] = {"__name__": "example"}
    run_python(page, block.text, names)
    source = write_model(tmp_path / "source", "mixtral")
    tensors = {name: t.cuda() for name, t in load_file(source / "model.safetensors").items()}
    config = json.loads((source / "config.json").read_text())
    moe = names["MoEBlock"]("model.layers.1.block_sparse_moe", tensors, config)
    hidden = moe.router.shape[1]
    names |= {
        "block": moe,
        "prompt": torch.randn(100, hidden, device="cuda", dtype=torch.bfloat16),
        "tokens": torch.randn(4, hidden, device="cuda", dtype=torch.bfloat16),
    }
    run_python(page, serving.text, names)
    assert torch.equal(names["static_y"], moe(names["tokens"]))
    assert torch.equal(names["y_prompt"], moe(names["prompt"]))

    prefix = "model.layers.0.block_sparse_moe.experts."
    moe.reload({k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)})
    before = names["static_y"].clone()
    names["decode"].replay()
    assert torch.equal(names["static_y"], moe(names["tokens"]))
    assert not torch.allclose(names["static_y"], before)
