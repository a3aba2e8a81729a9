"""Small checkpoint directories."""

from __future__ import annotations

from pathlib import Path

import pytest

from checkpoints import CheckpointSpec, write_checkpoint

SPEC = CheckpointSpec(num_experts=2, hidden_size=64, intermediate_size=64)


@pytest.fixture
def single(tmp_path: Path) -> Path:
    write_checkpoint(tmp_path / "single", SPEC)
    return tmp_path / "single"


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    write_checkpoint(tmp_path / "sharded", SPEC, shards=3)
    return tmp_path / "sharded"
