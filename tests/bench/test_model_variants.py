"""Every variant runs the same experts: the same logits, by the way that its name says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from folders import golden
from hf_checkpoints import write_model
from marlin_moe.bench import model_variants, zeroed_workspace
from marlin_moe.bench.model_timing import StaticDecode, generate_timed, random_prompts
from marlin_moe.bench.model_variants import VARIANTS, put_variant
from marlin_moe.cli import bench as command
from marlin_moe.integrations.transformers import expert_layers, load_model
from marlin_moe.kernels.workspace import Workspace

PROMPT = torch.tensor([[3, 99, 17, 201, 5, 64, 64, 130, 8]])


KIMI = "kimi_k25"
"""Of two parts, language and vision; only the first has experts."""


@pytest.fixture(params=["qwen3_moe", "deepseek_v3", KIMI])
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    if request.param == KIMI:
        path = golden("kimi-k25-w4a16-g32")
    else:
        path = write_model(tmp_path / "source", request.param)
    return load_model(path, dtype=torch.float32)


def test_all_variants_give_the_same_logits(model: Any) -> None:
    expected = model(PROMPT).logits
    for name in VARIANTS:
        assert put_variant(model, name) is None
        tolerance = 1e-4 if name == "dequantized" else 0
        torch.testing.assert_close(model(PROMPT).logits, expected, rtol=0, atol=tolerance, msg=name)
    assert not expert_layers(model), "the last variant has the experts as plain weights"


def test_per_call_zeroes_what_the_call_needs_and_keeps_nothing(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = []
    zeros = torch.zeros

    def counted(*arguments: Any, **options: Any) -> torch.Tensor:
        made = zeros(*arguments, **options)
        if made.dtype == torch.uint8:
            sizes.append(made.nbytes)
        return made

    put_variant(model, "per-call")
    monkeypatch.setattr(zeroed_workspace.torch, "zeros", counted)
    for tokens in (1, 9):
        model(PROMPT[:, :tokens])
    layers = len(expert_layers(model))
    assert len(sizes) == 2 * layers
    assert sizes[0] < sizes[-1], "the call's size, not the largest"
    assert all(layer.workspace.nbytes == 0 for layer in expert_layers(model).values())


def test_a_persistent_workspace_is_bound_once(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    bound = []
    bind = Workspace._bind
    monkeypatch.setattr(Workspace, "_bind", lambda self, *args: bound.append(1) or bind(self, *args))
    put_variant(model, "per-call")
    put_variant(model, "persistent")
    for _ in range(3):
        model(PROMPT)
    assert len(bound) == len(expert_layers(model))


def test_reference_is_asked_for_by_name(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    op = model_variants.fused_marlin_moe
    monkeypatch.setattr(
        model_variants, "fused_marlin_moe", lambda *a, **o: asked.append(o["backend"]) or op(*a, **o)
    )
    put_variant(model, "reference")
    model(PROMPT)
    assert asked == ["reference"] * len(expert_layers(model))


def test_plain_weights_that_do_not_fit_are_not_made(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_variants, "free_bytes", lambda device: 1000)
    assert put_variant(model, "dequantized") == "needs 0.0 GB more, 0.0 GB are free"
    assert expert_layers(model)


def test_the_static_step_gives_generates_tokens(model: Any) -> None:
    """What is captured as a graph decodes as generate() does."""
    prompts = random_prompts(model, 2, 9)
    _, later, expected = generate_timed(model, prompts, 5)
    assert len(later) == 4
    decode = StaticDecode(model, prompts, 4)
    address, found = decode.token.data_ptr(), [decode.token.clone()]
    for _ in range(4):
        decode.step()
        found.append(decode.token.clone())
    torch.testing.assert_close(torch.cat(found, dim=1), expected)
    assert decode.token.data_ptr() == address


def test_the_commands_names_are_the_variants() -> None:
    assert command.VARIANTS == VARIANTS
