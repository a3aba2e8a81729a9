"""About how long the paths take on Hopper, to choose between them. Integers: nanoseconds.

Fitted by hand to the figures in `benchmarks/notes.md` (H200, graph replay, cold weights), which these meet
within 15 %: prefill at M = 256, 512, 1024 and 4096, decode up to 128. Routing is taken to be even.
"""

import math

from . import decode, prefill
from .problem import LayerFacts, MatrixFacts

BYTES_PER_NS = 4300  # of memory, reading
FLOP_PER_NS = 690_000  # of wgmma, in the prefill kernels

DECODE_FIXED_NS, DECODE_WEIGHTS_PERCENT = 13_000, 108
"""Of a decode call: what it takes besides its weights, and what reading them takes, in percent of their bytes
at full speed."""

DECODE_SLOT_NS = {8: 560, 16: 870, 32: 1500}
"""What a multiprocessor takes for a slot (16 KiB of words: dequantized, multiplied), by token tile. Measured
with int4 in bf16; 32, which has one team of warps instead of two, is a guess."""

MULTIPROCESSORS = 132

PREFILL_FIXED_NS, PREFILL_WEIGHTS_PERCENT, PREFILL_SHOWN_PERCENT = 26_000, 102, 42
"""Of a prefill call, the same; and how much is seen of weights or products, whichever takes less."""

MOST_FOR_ROUNDS = 1.4  # fewer items than blocks still read faster than their share of the blocks


def decode_ns(facts: LayerFacts, *, rows: int) -> int:
    """The decode path's time for `rows` rows (as many as it takes).

    An expert's weights are read from memory once, and dequantized again for each of its token tiles: the call
    takes as long as the slower of both.
    """
    tile = decode.token_tile(facts, rows=rows)
    weights = _weights_ns(facts, active_experts(facts, rows=rows)) * DECODE_WEIGHTS_PERCENT // 100
    slots = token_tiles(facts, rows=rows, tile=tile) * sum(map(decode.tile_slots, (facts.w13, facts.w2)))
    return DECODE_FIXED_NS + max(weights, round(slots * DECODE_SLOT_NS[tile] / MULTIPROCESSORS))


def prefill_ns(facts: LayerFacts, *, rows: int) -> int:
    """The prefill path's time for `rows` rows.

    Weights are read as fast as memory allows while every block has a work item: the last round of items of
    each GEMM takes as long as a full one.
    """
    here = _rows_here(facts, rows)
    tile = prefill.choose_tile(-(-rows // facts.num_global_experts))
    tiles = token_tiles(facts, rows=rows, tile=tile.rows)
    experts = active_experts(facts, rows=rows)
    weights = sum(
        _matrix_ns(matrix, experts) * _rounds(tiles * columns, MULTIPROCESSORS * tile.blocks_per_sm)
        for matrix, columns in zip((facts.w13, facts.w2), prefill.column_tiles(facts), strict=True)
    )
    products = 2 * here * sum(m.size_k * m.size_n for m in (facts.w13, facts.w2)) // FLOP_PER_NS
    less, more = sorted((round(weights) * PREFILL_WEIGHTS_PERCENT // 100, products))
    slots = 4 * here * facts.hidden_size // BYTES_PER_NS  # written by GEMM 2 and read by the sum
    return PREFILL_FIXED_NS + more + less * PREFILL_SHOWN_PERCENT // 100 + slots


def _rounds(items: float, blocks: int) -> float:
    """By how much longer a GEMM takes because its last round is not full."""
    return min(MOST_FOR_ROUNDS, math.ceil(items / blocks) * blocks / items)


def active_experts(facts: LayerFacts, *, rows: int) -> int:
    """How many of the layer's experts `rows` rows reach, at least one."""
    missed = (1 - 1 / facts.num_global_experts) ** rows  # by all rows
    return max(1, round(facts.num_experts * (1 - missed)))


def token_tiles(facts: LayerFacts, *, rows: int, tile: int) -> float:
    """How many tiles of at most `tile` rows of one expert `rows` rows make on this rank, on average."""
    others = facts.num_global_experts - 1
    if others == 0:
        return -(-rows // tile)
    share = -(-rows // facts.num_global_experts)
    chance = (others / facts.num_global_experts) ** rows  # of an expert to have no row
    tiles = 0.0
    for count in range(1, min(rows, 4 * share + 40) + 1):  # an expert that has more is too rare to matter
        chance *= (rows - count + 1) / (count * others)
        tiles += chance * -(-count // tile)
    return facts.num_experts * tiles


def _rows_here(facts: LayerFacts, rows: int) -> int:
    return -(-rows * facts.num_experts // facts.num_global_experts)


def _weights_ns(facts: LayerFacts, experts: int) -> int:
    return sum(_matrix_ns(matrix, experts) for matrix in (facts.w13, facts.w2))


def _matrix_ns(matrix: MatrixFacts, experts: int) -> int:
    return experts * _expert_bytes(matrix) // BYTES_PER_NS


def _expert_bytes(matrix: MatrixFacts) -> int:
    """Words, scales and zero points of one expert."""
    zeros = matrix.bits * matrix.num_groups if matrix.zero_points else 0
    return matrix.size_n * (matrix.size_k * matrix.bits + 16 * matrix.num_groups + zeros) // 8
