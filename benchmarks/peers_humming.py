"""Humming's indexed MoE GEMMs with its own heuristics, on the same weights as our layers, in its layout.

`.peers/` (or $MARLIN_MOE_PEERS) holds the package `humming` of the wheel humming-kernels. It compiles a
kernel for each of its tuning ranges; $HUMMING_CACHE_DIR keeps them. Alignment is vLLM's.

Its launcher reads the metadata of the kernel for one row before it looks for the call's, whatever the call: a
tuning in which no range holds one row is refused ("shape_m is not within any range defined in configs").
"""

import json
import platform
import sys
from collections.abc import Sequence
from typing import Any

import torch
from layer_tensors import Routing
from peers_vllm import PEERS, align, load_library

from marlin_moe import MarlinMoELayer
from marlin_moe.kernels import layout
from marlin_moe.kernels.matrix import MarlinMatrix

COMPUTE = {"use_batch_invariant": False, "use_f16_accum": False, "gemm_type": "indexed"}
WIDEST_BLOCK = 64
EXPERTS_AT_ONCE = 8  # unpacking takes many times a matrix's bytes
LAUNCHER_ROWS = 1  # the launcher always asks for these


class Humming:
    """Humming's layers.

    Args:
        layers: ours, for the weights.
        rows: the numbers of rows (M * T) that will run: only their ranges, and that of one row, are compiled.
    """

    def __init__(self, layers: Sequence[MarlinMoELayer], *, rows: Sequence[int]) -> None:
        load_library()
        if str(PEERS) not in sys.path:
            sys.path.append(str(PEERS))
        compiler = PEERS / "humming" / "_native" / platform.machine() / "nvrtc_compile"
        compiler.chmod(0o755)  # unpacked by zipfile, which loses the mode
        from humming.tune import get_heuristics_config

        if layers[0].w13.sort_order is not None:
            raise ValueError("Humming takes no act-order")
        self.num_experts = layers[0].num_experts
        self.pairs = [tuple(_humming_layer(matrix) for matrix in (layer.w13, layer.w2)) for layer in layers]
        self.compute = json.dumps(COMPUTE)
        self.tuning = [
            ranges_of(get_heuristics_config(layer_config=one.humming_config, gemm_type="indexed"), rows)
            for one in self.pairs[0]
        ]
        self.tuning_text = [json.dumps(entries) for entries in self.tuning]

    def __call__(self, index: int, x: torch.Tensor, routing: Routing) -> torch.Tensor:
        """The output of layer `index`."""
        from peer_kernels import silu_and_mul, sum_slots

        tokens, top_k = routing.ids.shape
        rows = tokens * top_k
        w13, w2 = self.pairs[index]
        blocks = [_block_rows(entries, rows) for entries in self.tuning]
        first = align(routing.ids, blocks[0], self.num_experts)
        second = first if blocks[0] == blocks[1] else align(routing.ids, blocks[1], self.num_experts)
        hidden = torch.empty(rows, w13.shape_n, dtype=x.dtype, device=x.device)
        inner = torch.empty(rows, w13.shape_n // 2, dtype=x.dtype, device=x.device)
        slots = torch.empty(rows, w2.shape_n, dtype=x.dtype, device=x.device)
        out = torch.empty_like(x)
        self._gemm(w13, x, hidden, first, top_k=top_k, rows=rows, tuning=self.tuning_text[0])
        silu_and_mul(hidden, inner)
        self._gemm(w2, inner, slots, second, top_k=1, rows=rows, tuning=self.tuning_text[1])
        sum_slots(slots, routing.weights, out, weighted=True)
        return out

    def _gemm(
        self,
        layer: Any,
        x: torch.Tensor,
        out: torch.Tensor,
        routed: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        *,
        top_k: int,
        rows: int,
        tuning: str,
    ) -> None:
        layer(
            x,
            outputs=out,
            sorted_ids=routed[0],
            expert_ids=routed[1],
            num_tokens_padded=routed[2],
            top_k=top_k,
            valid_shape_m=rows,
            compute_config=self.compute,
            tuning_config=tuning,
        )


def ranges_of(entries: Sequence[Any], rows: Sequence[int]) -> list[Any]:
    """The (low, high, config) with low < count <= high for one of the counts, or for the launcher's own."""
    counts = (LAUNCHER_ROWS, *rows)
    return [entry for entry in entries if any(entry[0] < count <= entry[1] for count in counts)]


def _humming_layer(matrix: MarlinMatrix) -> Any:
    """The matrix as Humming stores it: checkpoint layout first, then its own transformation."""
    from humming.layer import HummingLayer

    form = matrix.format
    weight = {"dtype": f"uint{form.bits}", "group_size": form.group_size or 0}
    if not form.symmetric:
        weight["has_zero_point"] = True
    with torch.device(matrix.device):
        layer = HummingLayer(
            shape_n=matrix.size_n,
            shape_k=matrix.size_k,
            num_experts=matrix.num_experts,
            torch_dtype=matrix.scales.dtype,
            weight_config=weight,
        )
    for start in range(0, matrix.num_experts, EXPERTS_AT_ONCE):
        some = slice(start, start + EXPERTS_AT_ONCE)
        layer.weight.data[some] = layout.unpack_qweight(matrix.qweight[some], bits=form.bits)
    layer.weight_scale.data.copy_(layout.unpermute_scales(matrix.scales))
    if matrix.zero_points is not None:
        layer.zero_point.data.copy_(layout.unpack_zero_points(matrix.zero_points, bits=form.bits))
    layer.transform(allow_inplace=True)
    return layer


def _block_rows(entries: Sequence[Any], rows: int) -> int:
    """Rows of a block for this many rows, as alignment has to know."""
    found = next((config for low, high, config in entries if low < rows <= high), None)
    return WIDEST_BLOCK if found is None else int(found["block_shape"][0])
