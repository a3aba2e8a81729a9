"""About how long the paths take on Hopper, to choose between them. Integers: nanoseconds.

Fitted by hand to the figures in `benchmarks/notes.md` (H200, graph replay, cold weights), which these meet
within 15 %. Routing is taken to be even.
"""

import math

from . import decode
from .problem import LayerFacts, MatrixFacts

BYTES_PER_NS = 4300  # of memory, reading
FLOP_PER_NS = 650_000  # of wgmma, in the prefill kernels

DECODE_FIXED_NS, DECODE_WEIGHTS_PERCENT = 14_000, 117
"""Of a decode call: what it takes besides its weights, and what they take, in percent of reading them."""

PREFILL_FIXED_NS, PREFILL_WEIGHTS_PERCENT, PREFILL_SHOWN_PERCENT = 30_000, 125, 35
"""Of a prefill call, the same; and how much is seen of weights or products, whichever takes less."""


def decode_ns(facts: LayerFacts, *, rows: int) -> int:
    """The decode path's time for `rows` rows (as many as it takes).

    An expert of more rows than a token tile reads and dequantizes its weights again for each: about the time
    of reading them from memory, since dequantizing takes 0.94 of that (notes, kimi at M = 32).
    """
    active = active_experts(facts, rows=rows)
    share = -(-_rows_here(facts, rows) // active)
    usual_most = share + math.isqrt(share)  # a standard deviation more
    tiles = -(-usual_most // decode.token_tile(facts, rows=rows))
    return DECODE_FIXED_NS + _weights_ns(facts, active) * tiles * DECODE_WEIGHTS_PERCENT // 100


def prefill_ns(facts: LayerFacts, *, rows: int) -> int:
    """The prefill path's time for `rows` rows; not measured below M = 256."""
    here = _rows_here(facts, rows)
    weights = _weights_ns(facts, active_experts(facts, rows=rows)) * PREFILL_WEIGHTS_PERCENT // 100
    products = 2 * here * sum(m.size_k * m.size_n for m in (facts.w13, facts.w2)) // FLOP_PER_NS
    less, more = sorted((weights, products))
    slots = 4 * here * facts.hidden_size // BYTES_PER_NS  # written by GEMM 2 and read by the sum
    return PREFILL_FIXED_NS + more + less * PREFILL_SHOWN_PERCENT // 100 + slots


def active_experts(facts: LayerFacts, *, rows: int) -> int:
    """How many of the layer's experts `rows` rows reach, at least one."""
    missed = (1 - 1 / facts.num_global_experts) ** rows  # by all rows
    return max(1, round(facts.num_experts * (1 - missed)))


def _rows_here(facts: LayerFacts, rows: int) -> int:
    return -(-rows * facts.num_experts // facts.num_global_experts)


def _weights_ns(facts: LayerFacts, experts: int) -> int:
    return experts * (_expert_bytes(facts.w13) + _expert_bytes(facts.w2)) // BYTES_PER_NS


def _expert_bytes(matrix: MatrixFacts) -> int:
    """Words, scales and zero points of one expert."""
    zeros = matrix.bits * matrix.num_groups if matrix.zero_points else 0
    return matrix.size_n * (matrix.size_k * matrix.bits + 16 * matrix.num_groups + zeros) // 8
