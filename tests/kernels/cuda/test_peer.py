"""Our tensors in vLLM's published Marlin kernel, and its answer from ours."""

import math
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from folders import checkpoint_folders
from marlin_moe import MarlinMoELayer, load_layers
from marlin_moe.kernels.matrix import MarlinMatrix
from moe_cases import LIMITS, CaseLayer, DenseMoE, MoECall, MoECase, difference, make_call, make_layer

PEERS = Path(os.environ.get("MARLIN_MOE_PEERS") or Path(__file__).resolve().parents[3] / ".peers")
LIBRARY = "_moe_C_stable_libtorch.abi3.so"
NO_WORSE = 1.05  # of vLLM's error
HIDDEN_MULTIPLE = 128
TOKENS = (1, 3, 17, 64, 513)
REFUSALS = ("Invalid thread config: thread_m_blocks = ", "Unsupported shapes: MNK = ")
"""How its host code says that it has no kernel for a shape, before it launches one. Anything else is a fault:
csrc/moe/marlin_moe_wna16/ops.cu of vLLM."""

gpu = pytest.mark.gpu


class Peer:
    """vLLM's kernel, called as its own layer calls it, on the tensors of a `MarlinMoELayer`."""

    def __init__(self) -> None:
        torch.ops.load_library(str(PEERS / LIBRARY))
        sys.path.insert(0, str(PEERS))
        try:
            from scalar_type import scalar_types
        finally:
            sys.path.remove(str(PEERS))
        self.types = {(4, True): "uint4b8", (8, True): "uint8b128", (4, False): "uint4"}
        self.type_id = {key: getattr(scalar_types, name).id for key, name in self.types.items()}
        self.gemm_op = torch.ops._moe_C.moe_wna16_marlin_gemm
        self.align_op = torch.ops._moe_C.moe_align_block_size
        num_sms = torch.cuda.get_device_properties(0).multi_processor_count
        self.locks = torch.zeros(4 * num_sms, dtype=torch.int32, device="cuda")

    def reason_against(self, layer: MarlinMoELayer) -> str | None:
        """Why its MoE does not run this layer, or None."""
        if layer.hidden_size % HIDDEN_MULTIPLE:
            return f"H = {layer.hidden_size} is no multiple of {HIDDEN_MULTIPLE}"
        if layer.w13.sort_order is not None:
            return "act-order"
        for matrix in (layer.w13, layer.w2):
            if not matrix.format.symmetric and matrix.format.bits == 8:
                return "8 bits with zero points"
        return None if layer.gated else "an ungated layer"

    def __call__(self, call: MoECall, layer: MarlinMoELayer) -> torch.Tensor:
        """[M, H]: align, GEMM, SiLU, GEMM with the router weights, sum over slots."""
        tokens, top_k = call.ids.shape
        size = next((s for s in (8, 16, 32, 48, 64) if tokens * top_k / layer.num_experts / s < 0.9), 64)
        routing = self.align(call.ids.int(), size, layer.num_experts)
        weights = call.weights.float()
        hidden = self.gemm(
            call.x, layer.w13, routing, weights, size, top_k=top_k, rows=tokens * top_k, weighted=False
        )
        gate, up = hidden.float().chunk(2, 1)
        inner = (torch.nn.functional.silu(gate) * up).to(call.x.dtype)
        y = self.gemm(inner, layer.w2, routing, weights, size, top_k=1, rows=tokens * top_k, weighted=True)
        return y.view(tokens, top_k, -1).float().sum(1).to(call.x.dtype)

    def align(self, ids: torch.Tensor, size: int, num_experts: int) -> tuple[torch.Tensor, ...]:
        """(sorted slots, expert of each block of `size` slots, slots with padding)."""
        most = ids.numel() + num_experts * (size - 1)
        slots = torch.empty(most, dtype=torch.int32, device="cuda")
        experts = torch.empty(-(-most // size), dtype=torch.int32, device="cuda")
        padded = torch.empty(1, dtype=torch.int32, device="cuda")
        given = (ids, num_experts, size, slots, experts, padded)
        optional = len(self.align_op.default._schema.arguments) - len(given)
        self.align_op(*given, *[None] * optional)
        return slots, experts, padded

    def gemm(
        self,
        x: torch.Tensor,
        matrix: MarlinMatrix,
        routing: tuple[torch.Tensor, ...],
        weights: torch.Tensor,
        size: int,
        *,
        top_k: int,
        rows: int,
        weighted: bool,
    ) -> torch.Tensor:
        """[rows, N]; the arguments go by the names in the op's schema, which gained and lost some."""
        slots, experts, padded = routing
        out = torch.empty(rows, matrix.size_n, dtype=x.dtype, device="cuda")
        values: dict[str, Any] = {
            "a": x.contiguous(),
            "c": out,
            "b_q_weight": matrix.qweight,
            "b_bias": matrix.bias,
            "b_scales": matrix.scales,
            "a_scales": None,
            "global_scale": None,
            "b_zeros": matrix.zero_points,
            "g_idx": None,
            "perm": None,
            "workspace": self.locks,
            "sorted_token_ids": slots,
            "expert_ids": experts,
            "num_tokens_past_padded": padded,
            "topk_weights": weights,
            "moe_block_size": size,
            "top_k": top_k,
            "mul_topk_weights": weighted,
            "b_type_id": self.type_id[matrix.format.bits, matrix.format.symmetric],
            "size_m": x.shape[0],
            "size_n": matrix.size_n,
            "size_k": matrix.size_k,
            "is_full_k": True,
            "use_atomic_add": False,
            "use_fp32_reduce": True,
            "is_zp_float": False,
            "thread_k": -1,
            "thread_n": -1,
            "blocks_per_sm": -1,
        }
        other_names = {"b_q_type_id": "b_type_id", "b_q_type": "b_type_id", "is_k_full": "is_full_k"}
        names = [
            argument.name.removesuffix("_or_none") for argument in self.gemm_op.default._schema.arguments
        ]
        result: torch.Tensor = self.gemm_op(*[values[other_names.get(name, name)] for name in names])
        return result


@pytest.fixture(scope="module")
def peer() -> Peer:
    if not (PEERS / LIBRARY).is_file():
        pytest.skip(
            f"{PEERS / LIBRARY} is not there: put vLLM's published library there, or set "
            "MARLIN_MOE_PEERS to its folder"
        )
    return Peer()


PeerCall = Callable[[MoECall, MarlinMoELayer], torch.Tensor]


def compare(
    peer: PeerCall, made: CaseLayer, calls: list[MoECall], dtype: torch.dtype, *, backend: str = "cuda"
) -> None:
    """vLLM's answer from our tensors is right, and ours no more than 5 % further from float64.

    Skips where it refuses every call, once none has failed.
    """
    exact = DenseMoE(made)
    failures, refused = [], []
    for call in calls:
        tokens, want = call.x.shape[0], exact(call)
        try:
            answer = peer(call, made.layer)
        except RuntimeError as error:
            if not any(text in str(error) for text in REFUSALS):
                raise
            refused.append(f"M={tokens}: vLLM's kernel refuses it: {str(error).splitlines()[0]}")
            print(refused[-1])
            continue
        their_error, their_worst = difference(answer, want)
        our_error, our_worst = difference(call.run(made.layer, backend=backend), want)
        print(f"M={tokens}: relative error ours {our_error:.3e}, vLLM's {their_error:.3e}")
        if not their_error < 2 * LIMITS[dtype]:
            failures.append(f"M={tokens}: vLLM's error from our tensors is {their_error:.2e}; {their_worst}")
        if not our_error < LIMITS[dtype]:
            failures.append(f"M={tokens}: our error is {our_error:.2e}; {our_worst}")
        # Both errors are measured on M x H roundings: their ratio is known to 1 / sqrt(M x H) or so.
        if our_error > (NO_WORSE + 3 / math.sqrt(want.numel())) * their_error:
            failures.append(f"M={tokens}: our error {our_error:.3e} is above vLLM's {their_error:.3e}")
    assert not failures, "\n".join(failures)
    if len(refused) == len(calls):
        pytest.skip("; ".join(refused))


FORMATS = [
    pytest.param(
        MoECase(bits=bits, symmetric=symmetric, group_size=group_size, dtype=dtype),
        id=f"w{bits}{'' if symmetric else 'z'} {group_size} {str(dtype).removeprefix('torch.')}",
    )
    for bits, symmetric in ((4, True), (4, False), (8, True))
    for group_size in (32, 64, 128, None)
    for dtype in (torch.bfloat16, torch.float16)
]


@gpu
@pytest.mark.parametrize("form", FORMATS)
def test_every_format_that_both_run(peer: Peer, form: MoECase) -> None:
    made = make_layer(form, "cuda")
    assert peer.reason_against(made.layer) is None
    calls = [make_call(replace(form, tokens=tokens), made.layer) for tokens in TOKENS]
    compare(peer, made, calls, form.dtype)


@gpu
@pytest.mark.parametrize(
    "changes", [{"biased": True}, {"padding": 32}, {"w2_bits": 8}, {"top_k": 1}], ids=str
)
def test_what_both_have_besides(peer: Peer, changes: dict[str, Any]) -> None:
    form = replace(MoECase(), **changes)
    made = make_layer(form, "cuda")
    calls = [make_call(replace(form, tokens=tokens), made.layer) for tokens in TOKENS]
    compare(peer, made, calls, form.dtype)


@gpu
@pytest.mark.parametrize("path", checkpoint_folders(), ids=lambda path: path.name)
def test_layers_of_real_checkpoints(peer: Peer, path: Path) -> None:
    """Every layer of a folder that vLLM's kernel runs; a folder with none is skipped with the reason."""
    reasons, compared = [], 0
    for name, layer in load_layers(path, device="cuda").items():
        reason = peer.reason_against(layer)
        if reason is not None:
            reasons.append(f"{name}: {reason}")
            continue
        case = MoECase(dtype=layer.scales_dtype, hidden_size=layer.hidden_size, top_k=2)
        calls = [make_call(replace(case, tokens=tokens), layer) for tokens in TOKENS]
        assert layer.w13.bias is None, "these checkpoints have no biases"
        try:
            compare(peer, CaseLayer(layer=layer), calls, layer.scales_dtype)
        except pytest.skip.Exception as refusal:
            reasons.append(f"{name}: {refusal}")
        else:
            compared += 1
    if not compared:
        pytest.skip("; ".join(reasons))


@pytest.mark.parametrize(
    "text",
    ["CUDA error: an illegal memory access was encountered", "CUDA out of memory.", "a is not contiguous"],
)
def test_a_fault_of_the_peer_is_no_refusal(text: str) -> None:
    """On a CPU: whatever it raises that is not about a shape fails the test."""
    case = MoECase(tokens=1)
    made = make_layer(case)

    def broken(call: MoECall, layer: MarlinMoELayer) -> torch.Tensor:
        raise RuntimeError(text)

    with pytest.raises(RuntimeError, match=text):
        compare(broken, made, [make_call(case, made.layer)], case.dtype)


def test_a_refusal_hides_no_failure() -> None:
    case = MoECase(tokens=2)
    made = make_layer(case)
    call = make_call(case, made.layer)

    def of_one_token_only(call: MoECall, layer: MarlinMoELayer) -> torch.Tensor:
        if call.x.shape[0] > 1:
            raise RuntimeError("Unsupported shapes: MNK = [2, 1, 1]")
        return torch.zeros_like(call.x)

    with pytest.raises(pytest.skip.Exception, match="M=2: vLLM's kernel refuses it: Unsupported shapes"):
        compare(of_one_token_only, made, [call], case.dtype)
    with pytest.raises(AssertionError, match="M=1: vLLM's error from our tensors is"):
        compare(of_one_token_only, made, [call.first(1), call], case.dtype, backend="reference")
