"""A small checkpoint of this tree with another config, or with other tensors."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from folders import golden

GOLDEN = golden("qwen3moe-w4a16-asym-g128")


def edited(tmp_path: Path, **changes: Any) -> Path:
    """The golden checkpoint with another config."""
    folder = shutil.copytree(GOLDEN, tmp_path / "edited")
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def altered(tmp_path: Path, **tensors: torch.Tensor) -> Path:
    """The golden checkpoint with other tensors."""
    folder = edited(tmp_path)
    file = folder / "model.safetensors"
    save_file(load_file(file) | tensors, file, metadata={"format": "pt"})
    return folder
