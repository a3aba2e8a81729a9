"""Models of `load_model` in bf16 on a CPU beside float32 ones, and faults that the comparison has to see."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bf16_logits import check_bf16_logits
from exact_model import exact_model
from folders import checkpoint_folders, golden
from hf_checkpoints import FAMILIES, write_model
from marlin_moe.integrations.transformers import expert_layers, load_model

CHECKPOINT = "qwen3moe-w4a16-g128-sharded"


@pytest.mark.filterwarnings("ignore:scales are converted once")  # AWQ's are fp16
@pytest.mark.parametrize("folder", checkpoint_folders(), ids=lambda path: path.name)
def test_checkpoints_of_the_public_tools_in_bf16(folder: Path) -> None:
    check_bf16_logits(load_model(folder, dtype=torch.bfloat16), exact_model(folder))


@pytest.mark.parametrize("family", FAMILIES)
def test_families_of_models_in_bf16(family: str, tmp_path: Path) -> None:
    source = write_model(tmp_path / "source", family)
    check_bf16_logits(load_model(source), exact_model(source))


@pytest.mark.parametrize("matrix", ["w13", "w2"])
@pytest.mark.parametrize("number", [0, 1])
def test_the_weights_of_another_expert_are_seen(number: int, matrix: str) -> None:
    """In one expert of one layer."""
    model = load_model(golden(CHECKPOINT), dtype=torch.bfloat16)
    qweight = getattr(list(expert_layers(model).values())[number], matrix).qweight
    qweight[3] = qweight[2]
    with pytest.raises(AssertionError, match=r"limit 0\.050, got"):
        check_bf16_logits(model, exact_model(golden(CHECKPOINT)))


def test_a_wrong_scale_of_one_expert_is_seen() -> None:
    model = load_model(golden(CHECKPOINT), dtype=torch.bfloat16)
    next(iter(expert_layers(model).values())).w13.scales[1] *= 1.25
    with pytest.raises(AssertionError, match=r"limit 0\.050, got"):
        check_bf16_logits(model, exact_model(golden(CHECKPOINT)))


def test_another_router_is_seen() -> None:
    model = load_model(golden(CHECKPOINT), dtype=torch.bfloat16)
    gate = model.model.layers[1].mlp.gate.weight
    gate.data = gate.data.roll(1, 0)
    with pytest.raises(AssertionError, match=r"layers\.1\.mlp\.experts: .* of the tokens routed"):
        check_bf16_logits(model, exact_model(golden(CHECKPOINT)))


def test_router_weights_that_are_not_normalized_are_seen() -> None:
    model = load_model(golden(CHECKPOINT), dtype=torch.bfloat16)
    gate = model.model.layers[0].mlp.gate
    gate.norm_topk_prob = not gate.norm_topk_prob
    with pytest.raises(AssertionError, match=r"layers\.0\.mlp\.experts: router weights off by"):
        check_bf16_logits(model, exact_model(golden(CHECKPOINT)))
