"""vLLM's Marlin MoE kernels, called as its own layer calls them, on the very tensors of our layers.

`.peers/` (or $MARLIN_MOE_PEERS) holds `_moe_C_stable_libtorch.abi3.so` and `scalar_type.py` of its wheel.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from layer_tensors import Routing

from marlin_moe import MarlinMoELayer
from marlin_moe.kernels.matrix import MarlinMatrix

PEERS = Path(os.environ.get("MARLIN_MOE_PEERS") or Path(__file__).resolve().parent.parent / ".peers")
LIBRARY = "_moe_C_stable_libtorch.abi3.so"
BLOCK_SIZES = (8, 16, 32, 48, 64)
FULLEST = 0.9  # an expert's average share of rows fills this part of a block at most, where a block is larger
TYPES = {(4, True): "uint4b8", (8, True): "uint8b128", (4, False): "uint4"}
LOCKS_PER_SM = 4


def load_library() -> None:
    """Registers `torch.ops._moe_C`."""
    path = PEERS / LIBRARY
    if not path.is_file():
        raise FileNotFoundError(f"{path}: expected vLLM's published kernels; see benchmarks/README.md")
    torch.ops.load_library(str(path))


def type_id(bits: int, symmetric: bool) -> int:
    """vLLM's number of a weight type."""
    sys.path.insert(0, str(PEERS))
    try:
        from scalar_type import scalar_types
    finally:
        sys.path.remove(str(PEERS))
    found: int = getattr(scalar_types, TYPES[bits, symmetric]).id
    return found


def align(ids: torch.Tensor, block: int, num_experts: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(slots sorted by expert, the expert of each block of slots, how many there are with padding)."""
    count = ids.numel()
    most = count + min(count, num_experts) * (block - 1)
    slots = torch.empty(most, dtype=torch.int32, device=ids.device)
    experts = torch.empty(-(-most // block), dtype=torch.int32, device=ids.device)
    padded = torch.empty(1, dtype=torch.int32, device=ids.device)
    operator = torch.ops._moe_C.moe_align_block_size
    given = (ids, num_experts, block, slots, experts, padded)
    operator(*given, *[None] * (len(operator.default._schema.arguments) - len(given)))
    return slots, experts, padded


class Vllm:
    """vLLM's layer. `per_call`: its lock words are allocated and zeroed in every call, as its MoE does."""

    def __init__(self, layers: Sequence[MarlinMoELayer], *, per_call: bool = False) -> None:
        load_library()
        if layers[0].w13.sort_order is not None:
            raise ValueError("this version of vLLM's MoE kernel takes no act-order")
        self.layers = layers
        self.per_call = per_call
        form = layers[0].w13.format
        self.type_id = type_id(form.bits, form.symmetric)
        self.num_locks = LOCKS_PER_SM * torch.cuda.get_device_properties(0).multi_processor_count
        self.locks = self.new_locks()
        self.gemm_op = torch.ops._moe_C.moe_wna16_marlin_gemm
        self.names = [
            argument.name.removesuffix("_or_none") for argument in self.gemm_op.default._schema.arguments
        ]

    def new_locks(self) -> torch.Tensor:
        """Its workspace: zeros, which every launch leaves as zeros."""
        return torch.zeros(self.num_locks, dtype=torch.int32, device="cuda")

    def __call__(self, index: int, x: torch.Tensor, routing: Routing) -> torch.Tensor:
        """The output of layer `index`."""
        from peer_kernels import silu_and_mul, sum_slots

        layer = self.layers[index]
        tokens, top_k = routing.ids.shape
        rows = tokens * top_k
        block = next((b for b in BLOCK_SIZES if rows / layer.num_experts / b < FULLEST), BLOCK_SIZES[-1])
        routed = (*align(routing.ids, block, layer.num_experts), routing.weights)
        locks = self.new_locks() if self.per_call else self.locks
        width, hidden_size = layer.intermediate_size, layer.hidden_size
        shared = torch.empty(rows * max(2 * width, hidden_size), dtype=x.dtype, device=x.device)
        hidden = shared[: rows * 2 * width].view(rows, 2 * width)
        inner = torch.empty(rows, width, dtype=x.dtype, device=x.device)
        slots = shared[: rows * hidden_size].view(rows, hidden_size)
        out = torch.empty_like(x)
        self.gemm(x, hidden, layer.w13, routed, locks, block=block, top_k=top_k, weighted=False)
        silu_and_mul(hidden, inner)
        self.gemm(inner, slots, layer.w2, routed, locks, block=block, top_k=1, weighted=True)
        sum_slots(slots, routing.weights, out, weighted=False)
        return out

    def gemm(
        self,
        x: torch.Tensor,
        out: torch.Tensor,
        matrix: MarlinMatrix,
        routed: tuple[torch.Tensor, ...],
        locks: torch.Tensor,
        *,
        block: int,
        top_k: int,
        weighted: bool,
    ) -> None:
        """out = x times its experts; arguments go by the names in the op's schema, which changes."""
        slots, experts, padded, weights = routed
        values: dict[str, Any] = {
            "a": x,
            "c": out,
            "b_q_weight": matrix.qweight,
            "b_scales": matrix.scales,
            "b_zeros": matrix.zero_points,
            "workspace": locks,
            "sorted_token_ids": slots,
            "expert_ids": experts,
            "num_tokens_past_padded": padded,
            "topk_weights": weights,
            "moe_block_size": block,
            "top_k": top_k,
            "mul_topk_weights": weighted,
            "b_type_id": self.type_id,
            "size_m": x.shape[0],
            "size_n": matrix.size_n,
            "size_k": matrix.size_k,
            "use_atomic_add": False,
            "use_fp32_reduce": True,
            "is_zp_float": False,
            "thread_k": -1,
            "thread_n": -1,
            "blocks_per_sm": -1,
        }
        self.gemm_op(*[values.get(name) for name in self.names])
