"""The op against a dense float64 reference of the dequantized layer."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional

import marlin_moe.kernels.backends.reference as reference_backend
from marlin_moe import Activation, MarlinMoEError, MarlinMoELayer, fused_marlin_moe
from oracle import moe
from random_layer import random_bias, random_calls, random_layer, relative_error

Calls = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # x [M, H], topk_weights [M, T], topk_ids [M, T]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 5e-3, torch.float16: 1e-3}


def expected(layer: MarlinMoELayer, calls: Calls, **options: Any) -> torch.Tensor:
    """float64 [M, H] of the layer's exact weights."""
    (x, weights, ids), (w13, w2) = calls, layer.dequantize()
    options = {"expert_map": layer.expert_map, "gated": layer.gated} | options
    return moe(x, w13, w2, ids, weights, **options)


def run(layer: MarlinMoELayer, calls: Calls, **options: Any) -> torch.Tensor:
    x, weights, ids = calls
    return fused_marlin_moe(x, layer, weights, ids, **options)


def check(layer: MarlinMoELayer, calls: Calls, **options: Any) -> None:
    """The op and the dense reference agree within the dtype's tolerance, and nothing was changed."""
    x, _, ids = calls
    given = [tensor.clone() for tensor in calls]
    got = run(layer, calls, **options)
    assert (got.dtype, got.device, got.requires_grad) == (x.dtype, x.device, False)
    error = relative_error(got, expected(layer, calls, **options))
    assert error < TOLERANCE[x.dtype], f"relative error {error:.2e} for {x.dtype} {tuple(ids.shape)}"
    torch.testing.assert_close(list(calls), given, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("top_k", [1, 2, 3, 4])
@pytest.mark.parametrize("tokens", [0, 1, 7, 33])
def test_tokens_and_slots(tokens: int, top_k: int, dtype: torch.dtype) -> None:
    layer = random_layer()
    check(layer, random_calls(tokens, tokens, top_k, layer, dtype))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group_size", [32, 64, 128, None])
def test_formats(group_size: int | None, symmetric: bool, bits: int) -> None:
    layer = random_layer(
        bits=bits, group_size=group_size, symmetric=symmetric, hidden_size=256, padded_intermediate_size=128
    )
    check(layer, random_calls(0, 5, 2, layer))


@pytest.mark.parametrize("scales", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_any_mix_of_dtypes(dtype: torch.dtype, scales: torch.dtype) -> None:
    layer = random_layer(dtype=scales)
    x, weights, ids = random_calls(0, 5, 2, layer, dtype)
    check(layer, (x, weights, ids))
    check(layer, (x, weights.to(dtype), ids))


def test_float32_is_no_worse_than_float32_sums() -> None:
    layer = random_layer(hidden_size=1024, padded_intermediate_size=512)
    x, weights, ids = random_calls(0, 6, 3, layer)
    error = relative_error(run(layer, (x, weights, ids)), expected(layer, (x, weights, ids)))
    assert error < 2e-6


def test_the_result_is_rounded_once() -> None:
    layer = random_layer()
    x, weights, ids = random_calls(0, 9, 4, layer, torch.bfloat16)
    exact = fused_marlin_moe(x.float(), layer, weights, ids, routed_scaling_factor=2.5)
    rounded = run(layer, (x, weights, ids), routed_scaling_factor=2.5)
    assert torch.equal(rounded, exact.bfloat16())


def test_act_order() -> None:
    made = torch.Generator().manual_seed(0)
    order = torch.stack([torch.randperm(128, generator=made) for _ in range(5)]).int()
    layer, plain = random_layer(w13_sort_order=order), random_layer()
    calls = random_calls(0, 7, 2, layer)
    check(layer, calls)
    assert relative_error(run(plain, calls), expected(layer, calls)) > 0.1


@pytest.mark.parametrize("on_input", [False, True])
@pytest.mark.parametrize("gated", [False, True])
def test_bias(gated: bool, on_input: bool) -> None:
    w13, w13_marlin = random_bias(1, 5, 256 if gated else 128, torch.bfloat16)
    w2, w2_marlin = random_bias(2, 5, 128, torch.bfloat16)
    layer = random_layer(padded_intermediate_size=128, gated=gated, w13_bias=w13_marlin, w2_bias=w2_marlin)
    x, weights, ids = random_calls(0, 7, 2, layer)
    kind = "silu" if gated else "silu_no_mul"
    got = run(layer, (x, weights, ids), activation=kind, apply_router_weight_on_input=on_input)
    options: dict[str, Any] = {"w13_bias": w13, "w2_bias": w2, "apply_router_weight_on_input": on_input}
    if not gated:
        options["activation"] = functional.silu
    assert relative_error(got, expected(layer, (x, weights, ids), **options)) < 1e-5


ACTIVATIONS: dict[Activation | str, Callable[..., torch.Tensor]] = {
    "silu": lambda gate, up: functional.silu(gate) * up,
    "gelu": lambda gate, up: functional.gelu(gate) * up,
    "gelu_tanh": lambda gate, up: functional.gelu(gate, approximate="tanh") * up,
    Activation("swiglu_oai", alpha=1.702, limit=0.5): lambda gate, up: (
        gate.clamp(max=0.5) * torch.sigmoid(1.702 * gate.clamp(max=0.5)) * (up.clamp(-0.5, 0.5) + 1)
    ),
    Activation("silu_clamped", limit=0.5): lambda gate, up: (
        functional.silu(gate.clamp(max=0.5)) * up.clamp(-0.5, 0.5)
    ),
    Activation("situ", beta=0.5, linear_beta=0.7): lambda gate, up: (
        0.5 * torch.tanh(gate / 0.5) * torch.sigmoid(gate) * 0.7 * torch.tanh(up / 0.7)
    ),
    "silu_no_mul": functional.silu,
    "relu2": lambda h: functional.relu(h) ** 2,
}


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
def test_activations(activation: Activation | str) -> None:
    gated = Activation.parse(activation).gated
    layer = random_layer(gated=gated, intermediate_size=96, padded_intermediate_size=128)
    x, weights, ids = random_calls(0, 9, 2, layer)
    got = run(layer, (x, weights, ids), activation=activation)
    want = expected(layer, (x, weights, ids), activation=ACTIVATIONS[activation])
    assert relative_error(got, want) < 1e-5
    others = [
        other for other in ACTIVATIONS if Activation.parse(other).gated == gated and other != activation
    ]
    for other in others:
        assert relative_error(run(layer, (x, weights, ids), activation=other), want) > 5e-5


@pytest.mark.parametrize("top_k", [1, 3])
def test_router_weight_on_input(top_k: int) -> None:
    layer = random_layer()
    check(layer, random_calls(0, 7, top_k, layer), apply_router_weight_on_input=True)


@pytest.mark.parametrize("factor", [2.5, 1, 0.0, -1.0])
def test_routed_scaling_factor(factor: float) -> None:
    layer = random_layer()
    check(layer, random_calls(0, 7, 2, layer), routed_scaling_factor=factor)


class TestRouting:
    @pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
    def test_ids_of_minus_one_add_nothing(self, dtype: torch.dtype) -> None:
        layer = random_layer()
        x, weights, ids = random_calls(0, 9, 3, layer)
        ids[0, 1] = ids[3, :] = ids[8, 2] = -1
        weights[ids == -1] = torch.nan
        check(layer, (x, weights, ids.to(dtype)))
        assert not run(layer, (x, weights, ids))[3].any()

    def test_no_slot_reaches_an_expert(self) -> None:
        layer = random_layer()
        x, weights, _ = random_calls(0, 4, 2, layer)
        out = torch.full_like(x, torch.nan)
        assert fused_marlin_moe(x, layer, weights, torch.full((4, 2), -1), out=out) is out
        assert torch.equal(out, torch.zeros_like(x))

    @pytest.mark.parametrize("with_map", [False, True])
    def test_ids_out_of_range_add_nothing_where_they_are_not_checked(
        self, monkeypatch: pytest.MonkeyPatch, with_map: bool
    ) -> None:
        monkeypatch.setattr("marlin_moe.kernels.arguments._check_values", lambda *_: None)
        local = torch.tensor([3, -1, 9, 0, -7], dtype=torch.int32) if with_map else None
        layer = random_layer()
        x, weights, ids = random_calls(0, 5, 2, layer)
        ids[0, 0], ids[1, 1], ids[2, 0], ids[3, 1] = 5, -2, 2**40, -(2**40)
        inside = ids.where((ids >= 0) & (ids < 5), -1)
        if local is not None:
            inside = torch.tensor([3, -1, -1, 0, -1, -1])[inside]
        got = run(layer, (x, weights, ids), expert_map=local)
        assert relative_error(got, expected(layer, (x, weights, inside))) < 1e-5

    @pytest.mark.parametrize("expert", [0, 4])
    def test_all_tokens_to_one_expert(self, expert: int) -> None:
        layer = random_layer()
        x, weights, ids = random_calls(0, 33, 2, layer)
        check(layer, (x, weights, torch.full_like(ids, expert)))

    def test_only_hit_experts_are_dequantized(self, monkeypatch: pytest.MonkeyPatch) -> None:
        layer = random_layer(num_experts=9)
        x, weights, _ = random_calls(0, 3, 2, layer)
        used: list[int] = []
        inner = reference_backend.matmul

        def matmul(rows: torch.Tensor, matrix: Any, expert: int, *, out: torch.Tensor) -> None:
            used.append(expert)
            inner(rows, matrix, expert, out=out)

        monkeypatch.setattr(reference_backend, "matmul", matmul)
        fused_marlin_moe(x, layer, weights, torch.tensor([[8, 3], [3, 3], [-1, 8]]))
        assert used == [3, 3, 8, 8]

    @pytest.mark.parametrize("own_map", [True, False])
    @pytest.mark.parametrize("size", [2, 4])
    def test_expert_parallel_ranks_add_up(self, size: int, own_map: bool) -> None:
        whole = random_layer(num_experts=8)
        x, weights, ids = random_calls(0, 9, 3, whole)
        ids[2, 0] = -1
        total = torch.zeros(9, 128, dtype=torch.float64)
        for rank in range(size):
            first, last = rank * 8 // size, (rank + 1) * 8 // size
            local = torch.full((8,), -1, dtype=torch.int32)
            local[first:last] = torch.arange(last - first, dtype=torch.int32)
            rows = slice(first, last)
            layer = MarlinMoELayer.from_marlin(
                w13_qweight=whole.w13.qweight[rows],
                w13_scales=whole.w13.scales[rows],
                w2_qweight=whole.w2.qweight[rows],
                w2_scales=whole.w2.scales[rows],
                bits=4,
                group_size=32,
                symmetric=True,
                expert_map=local if own_map else torch.full((8,), -1, dtype=torch.int32),
            )
            part = run(layer, (x, weights, ids), expert_map=None if own_map else local)
            here = (ids >= first) & (ids < last)
            assert torch.equal(part[~here.any(1)], torch.zeros(int((~here.any(1)).sum()), 128))
            total += part.double()
        assert relative_error(total, expected(whole, (x, weights, ids))) < 1e-5

    def test_a_map_that_is_no_cut(self) -> None:
        layer = random_layer(expert_map=torch.tensor([4, -1, 0, 2, 2, -1, 1], dtype=torch.int32))
        check(layer, random_calls(0, 9, 3, layer))
        other = torch.tensor([-1, 3, -1, 4, 0, 1, 2], dtype=torch.int32)
        check(layer, random_calls(0, 9, 3, layer), expert_map=other)


class TestMemory:
    @pytest.mark.parametrize("max_tokens", [1, 2, 5, 32, 33, 34])
    def test_more_rows_than_the_workspace_run_in_chunks(self, max_tokens: int) -> None:
        layer = random_layer(max_tokens=max_tokens, top_k=2)
        calls = random_calls(0, 33, 2, layer)
        check(layer, calls)
        whole = random_layer(max_tokens=64)
        one_pass = run(whole, calls)
        assert relative_error(run(layer, calls), one_pass) < 1e-6

    def test_more_slots_than_the_workspace_was_made_for(self) -> None:
        layer = random_layer(max_tokens=3, top_k=2)
        check(layer, random_calls(0, 7, 2, layer))
        check(layer, random_calls(1, 7, 4, layer))
        assert layer.workspace is not None
        assert layer.workspace.plan is not None
        assert layer.workspace.plan.rows == 6
        with pytest.raises(MarlinMoEError, match=r"workspace: expected top_k = 7 rows or more, .*got 6"):
            run(layer, random_calls(2, 7, 7, layer))

    @pytest.mark.parametrize("max_tokens", [4, 64])
    def test_nothing_is_expected_in_the_scratch(self, max_tokens: int) -> None:
        layer = random_layer(max_tokens=max_tokens)
        x, weights, ids = random_calls(0, 9, 3, layer)
        ids[1, 1] = ids[5, :] = -1
        clean = run(layer, (x, weights, ids))
        assert layer.workspace is not None
        assert layer.workspace.scratch is not None
        for poison in (0xFF, 0x7F):  # float32 NaN and int32 -1; float32 NaN and a large int32
            layer.workspace.scratch.fill_(poison)
            assert torch.equal(run(layer, (x, weights, ids)), clean)
        assert relative_error(clean, expected(layer, (x, weights, ids))) < 1e-5

    def test_the_same_call_gives_the_same_bits(self) -> None:
        layer = random_layer()
        x, weights, ids = random_calls(0, 33, 4, layer, torch.bfloat16)
        first = run(layer, (x, weights, ids))
        for _ in range(5):
            fused_marlin_moe(x[:7], layer, weights[:7], ids[:7])
            assert torch.equal(run(layer, (x, weights, ids)), first)

    def test_out_is_written_and_returned(self) -> None:
        layer = random_layer(max_tokens=4)
        x, weights, ids = random_calls(0, 9, 2, layer, torch.float16)
        want = run(layer, (x, weights, ids))
        out = torch.full_like(x, torch.nan)
        assert run(layer, (x, weights, ids), out=out) is out
        assert torch.equal(out, want)

    def test_out_with_a_gap_between_rows(self) -> None:
        layer = random_layer(max_tokens=4)
        x, weights, ids = random_calls(0, 9, 2, layer)
        around = torch.full((9, 256), 7.0)
        out = around[:, 64:192]
        run(layer, (x, weights, ids), out=out)
        assert torch.equal(out, run(layer, (x, weights, ids)))
        assert (around[:, :64] == 7).all()
        assert (around[:, 192:] == 7).all()

    def test_out_beside_x_in_one_buffer(self) -> None:
        layer = random_layer(max_tokens=4)
        x, weights, ids = random_calls(0, 9, 2, layer)
        want = run(layer, (x, weights, ids))
        both = torch.cat([x, torch.full_like(x, torch.nan)], 1)
        fused_marlin_moe(both[:, :128], layer, weights, ids, out=both[:, 128:])
        assert torch.equal(both, torch.cat([x, want], 1))

    @pytest.mark.parametrize(
        "view",
        [
            pytest.param(lambda t: t.t().contiguous().t(), id="transposed"),
            pytest.param(lambda t: torch.cat([t, t], 1)[:, : t.shape[1]], id="gaps between rows"),
            pytest.param(lambda t: t.repeat_interleave(2, 1)[:, ::2], id="gaps between columns"),
            pytest.param(lambda t: torch.cat([t, t])[9:], id="offset"),
        ],
    )
    def test_strided_inputs(self, view: Callable[[torch.Tensor], torch.Tensor]) -> None:
        layer = random_layer(max_tokens=4)
        x, weights, ids = random_calls(0, 9, 2, layer)
        want = run(layer, (x, weights, ids))
        assert torch.equal(fused_marlin_moe(view(x), layer, view(weights), view(ids)), want)

    def test_one_row_for_all_tokens(self) -> None:
        layer = random_layer()
        x, weights, ids = random_calls(0, 9, 2, layer)
        check(layer, (x[:1].expand(9, -1), weights, ids))


class TestSurroundings:
    """What a caller may have switched on must not change the result."""

    def test_autocast(self) -> None:
        layer = random_layer()
        calls = random_calls(0, 5, 2, layer)
        want = run(layer, calls)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert torch.equal(run(layer, calls), want)

    def test_default_dtype_and_device(self) -> None:
        layer = random_layer()
        calls = random_calls(0, 5, 2, layer)
        want = run(layer, calls)
        torch.set_default_dtype(torch.float64)
        try:
            with torch.device("meta"):
                got = run(layer, calls)
        finally:
            torch.set_default_dtype(torch.float32)
        assert torch.equal(got, want)

    def test_reduced_float32_precision(self) -> None:
        layer = random_layer()
        calls = random_calls(0, 9, 2, layer)
        assert reference_backend.float32_is_exact(torch.device("cpu"))
        torch.set_float32_matmul_precision("medium")
        try:
            assert not reference_backend.float32_is_exact(torch.device("cpu"))
            assert not reference_backend.float32_is_exact(torch.device("cuda"))
            check(layer, calls)
        finally:
            torch.set_float32_matmul_precision("highest")
