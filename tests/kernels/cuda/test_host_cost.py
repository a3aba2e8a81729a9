"""What an eager call costs on the host: few launches, and time, which is printed for people to judge."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from device_work import device_work
from marlin_moe import fused_marlin_moe
from moe_cases import MoECase, large_layer, make_call, make_layer

CALLS = 1000
PASSES = (("moe",), ("decode",), ("prefill_route", "prefill_gemm", "prefill_gemm", "prefill_sum"))
"""The kernels of each path, in order."""
KERNELS = {name for kernels in PASSES for name in kernels}

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


def test_the_profiler_sees_launches() -> None:
    x = torch.zeros(8, device="cuda")
    assert len(device_work(lambda: x.add_(1).mul_(2))) == 2


@pytest.mark.parametrize("view", ["plain", "columns"])
@pytest.mark.parametrize("tokens", [1, 33, 513])
def test_an_eager_call_takes_few_launches(tokens: int, view: str) -> None:
    """The first call as well as repeated ones, and where x is copied because its rows are not vectors."""
    case = MoECase(tokens=tokens, hidden_size=256, padded_intermediate_size=64, top_k=2, view=view)
    made = make_layer(case, "cuda")
    call = make_call(case, made.layer)
    out = torch.empty(call.x.shape, dtype=call.x.dtype, device="cuda")
    call.run(made.layer)
    for form in (lambda: call.run(made.layer), lambda: call.run(made.layer, out=out)):
        names = [work.name for work in device_work(form)]
        ours = tuple(name for name in names if name in KERNELS)
        assert ours in PASSES, names
        assert len(names) - len(ours) <= (view == "columns"), names


def test_the_sum_of_one_slot_needs_no_launch() -> None:
    case = MoECase(tokens=513, hidden_size=256, padded_intermediate_size=64, top_k=1)
    made = make_layer(case, "cuda")
    call = make_call(case, made.layer)
    call.run(made.layer)
    names = tuple(work.name for work in device_work(lambda: call.run(made.layer)))
    assert names in (("moe",), PASSES[-1][:3])


@pytest.mark.parametrize("tokens", [1, 513])
def test_host_cost_of_an_eager_call(tokens: int, capsys: pytest.CaptureFixture[str]) -> None:
    layer = large_layer("cuda", num_experts=8, hidden_size=256, padded_intermediate_size=64, top_k=2)
    x = torch.randn(tokens, 256, device="cuda", dtype=torch.bfloat16)
    weights = torch.rand(tokens, 2, device="cuda")
    ids = torch.tensor([[1, 6]], device="cuda").repeat(tokens, 1)
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
        print(f"\nhost time of a call at M = {tokens}, {torch.cuda.get_device_name()}: {text}")
    assert torch.equal(out, fused_marlin_moe(x, layer, weights, ids))
