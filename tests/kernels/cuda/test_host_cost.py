"""What an eager call costs on the host; printed, for people to judge: a busy machine proves nothing."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from marlin_moe import fused_marlin_moe
from moe_cases import large_layer

CALLS = 1000

pytestmark = pytest.mark.gpu


def host_us(call: Callable[[], Any]) -> float:
    """Median over 10 rounds of the host time of a call; no round waits for the GPU within its calls."""
    rounds = []
    for _ in range(10):
        torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(CALLS // 10):
            call()
        rounds.append((time.perf_counter() - started) * 1e6 / (CALLS // 10))
    torch.cuda.synchronize()
    return statistics.median(rounds)


def test_host_cost_of_an_eager_call(capsys: pytest.CaptureFixture[str]) -> None:
    layer = large_layer("cuda", num_experts=8, hidden_size=256, padded_intermediate_size=64, top_k=2)
    x = torch.randn(1, 256, device="cuda", dtype=torch.bfloat16)
    weights, ids = torch.rand(1, 2, device="cuda"), torch.tensor([[1, 6]], device="cuda")
    out = torch.empty_like(x)
    forms: dict[str, Callable[[], Any]] = {
        "new result": lambda: fused_marlin_moe(x, layer, weights, ids),
        "with out": lambda: fused_marlin_moe(x, layer, weights, ids, out=out),
        "torch.empty_like alone": lambda: torch.empty_like(x),
    }
    costs = {}
    for name, form in forms.items():
        form()
        costs[name] = host_us(form)
    with capsys.disabled():
        text = ", ".join(f"{name} {us:.1f} us" for name, us in costs.items())
        print(f"\nhost time of a call at M = 1, {torch.cuda.get_device_name()}: {text}")
    assert torch.equal(out, fused_marlin_moe(x, layer, weights, ids))
