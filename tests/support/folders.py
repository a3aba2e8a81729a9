"""Real checkpoints with expected values: tests/golden, and the folders below $MARLIN_MOE_TEST_CHECKPOINTS."""

from __future__ import annotations

import os
from pathlib import Path

GOLDEN = Path(__file__).resolve().parent.parent / "golden"


def golden(name: str) -> Path:
    """The directory tests/golden/`name`. Not to be written to: copy it first."""
    path = GOLDEN / name
    if not (path / "config.json").is_file():
        raise FileNotFoundError(f"{path}: not one of {[p.name for p in golden_folders()]}")
    return path


def golden_folders() -> list[Path]:
    return sorted(file.parent for file in GOLDEN.glob("*/config.json"))


def checkpoint_folders() -> list[Path]:
    """Golden folders, then those of $MARLIN_MOE_TEST_CHECKPOINTS with expected values and another name."""
    folders = golden_folders()
    extra = os.environ.get("MARLIN_MOE_TEST_CHECKPOINTS")
    if extra:
        if not Path(extra).is_dir():
            raise FileNotFoundError(f"MARLIN_MOE_TEST_CHECKPOINTS={extra}: not a directory")
        known = {path.name for path in folders}
        found = sorted(file.parent for file in Path(extra).glob("*/expected.safetensors"))
        folders += [path for path in found if path.name not in known]
    return folders
