"""What surrounds the peers' GEMMs and is not in their libraries' published binaries, as Triton kernels."""

import torch
import triton
import triton.language as tl

WIDEST = 1024


@triton.jit
def _silu_and_mul(hidden, out, size, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    gate = tl.load(hidden + 2 * row * size + column, mask=inside).to(tl.float32)
    up = tl.load(hidden + (2 * row + 1) * size + column, mask=inside).to(tl.float32)
    value = gate * tl.sigmoid(gate) * up
    tl.store(out + row * size + column, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _sum_slots(slots, weights, out, size, TOP_K: tl.constexpr, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    total = tl.zeros((BLOCK,), tl.float32)
    for slot in tl.static_range(TOP_K):
        row = token * TOP_K + slot
        value = tl.load(slots + row * size + column, mask=inside).to(tl.float32)
        if WEIGHTED:
            value = value * tl.load(weights + row)
        total += value
    tl.store(out + token * size + column, total.to(out.dtype.element_ty), mask=inside)


def silu_and_mul(hidden: torch.Tensor, out: torch.Tensor) -> None:
    """out [rows, I] = silu(gate) * up of hidden [rows, 2I]."""
    rows, size = out.shape
    block = min(WIDEST, triton.next_power_of_2(size))
    _silu_and_mul[(rows, triton.cdiv(size, block))](hidden, out, size, BLOCK=block)


def sum_slots(slots: torch.Tensor, weights: torch.Tensor, out: torch.Tensor, *, weighted: bool) -> None:
    """out [M, H] = the sum over a token's slots of slots [M * T, H], times their weights if `weighted`."""
    tokens, size = out.shape
    _sum_slots[(tokens, triton.cdiv(size, WIDEST))](
        slots, weights, out, size, TOP_K=slots.shape[0] // tokens, WEIGHTED=weighted, BLOCK=WIDEST
    )
