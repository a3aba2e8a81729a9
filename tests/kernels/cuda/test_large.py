"""More than 2**31 elements in a buffer: every product of sizes is a 64-bit number."""

import pytest
import torch

from moe_cases import ACTIVATIONS, CaseLayer, DenseMoE, MoECall, difference, large_layer

OPTIONS = {
    "activation": ACTIVATIONS["silu"],
    "apply_router_weight_on_input": False,
    "routed_scaling_factor": 1.0,
}
PAST_INT32 = 2**31

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    ("tokens", "top_k", "hidden_size", "padded_intermediate_size", "what"),
    [
        pytest.param(40_000, 8, 7168, 64, "w2_output", id="rows x H"),
        pytest.param(40_000, 8, 128, 7168, "activations", id="rows x I"),
        pytest.param(300_000, 1, 7168, 64, "x", id="M x H"),
    ],
)
def test_more_than_two_to_the_31_elements(
    tokens: int, top_k: int, hidden_size: int, padded_intermediate_size: int, what: str
) -> None:
    """One pass over a buffer of that size; its first, middle and last tokens are right."""
    layer = large_layer(
        "cuda",
        num_experts=8,
        hidden_size=hidden_size,
        padded_intermediate_size=padded_intermediate_size,
        max_tokens=tokens,
        top_k=top_k,
    )
    made = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(tokens, hidden_size, generator=made, device="cuda", dtype=torch.bfloat16)
    weights = torch.rand(tokens, top_k, generator=made, device="cuda")
    ids = torch.randint(8, (tokens, top_k), generator=made, device="cuda")
    call = MoECall(x=x, weights=weights, ids=ids, options=OPTIONS)
    assert layer.workspace is not None
    assert layer.workspace.plan is not None
    sizes = {buffer.name: buffer.shape for buffer in layer.workspace.plan.buffers} | {"x": tuple(x.shape)}
    assert sizes[what][0] * sizes[what][1] > PAST_INT32, sizes
    got = call.run(layer, backend="cuda")
    exact = DenseMoE(CaseLayer(layer=layer))
    for start in (0, tokens // 2, tokens - 64):
        rows = slice(start, start + 64)
        part = MoECall(x=x[rows], weights=weights[rows], ids=ids[rows], options=OPTIONS)
        error, worst = difference(got[rows], exact(part))
        assert error < 5e-3, f"tokens {start}..{start + 63}: relative error {error:.2e}, {worst}"
    assert bool(torch.isfinite(got).all())
    assert not bool((got == 0).all(dim=1).any()), "a token was left out"


def test_weights_of_more_than_two_to_the_31_words() -> None:
    """qweight past 2**31 words (8.6 GB): experts at both ends give what they give in a small layer."""
    hidden_size, padded, per_expert = 4096, 4096, 4096 * 4096 * 2 // 8
    num_experts = PAST_INT32 // per_expert + 4
    layer = large_layer(
        "cuda",
        num_experts=num_experts,
        hidden_size=hidden_size,
        padded_intermediate_size=padded,
        max_tokens=16,
        top_k=2,
    )
    assert layer.w13.qweight.numel() > PAST_INT32
    made = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(16, hidden_size, generator=made, device="cuda", dtype=torch.bfloat16)
    weights = torch.rand(16, 2, generator=made, device="cuda")
    chosen = torch.tensor([0, 1, num_experts // 2, num_experts - 2, num_experts - 1], device="cuda")
    places = torch.randint(len(chosen), (16, 2), generator=made, device="cuda")
    call = MoECall(x=x, weights=weights, ids=chosen[places], options=OPTIONS)
    got = call.run(layer, backend="cuda")
    w13, w2 = layer.dequantize(chosen)
    exact = DenseMoE.of_weights(w13, w2)
    error, worst = difference(got, exact(MoECall(x=x, weights=weights, ids=places, options=OPTIONS)))
    assert error < 5e-3, f"relative error {error:.2e}, {worst}"
