"""A token tile times an expert's weights: `first_gemm` (x to activations) and `second_gemm` (those to slots).

A program has one token tile of the routing table and BLOCK_N columns; both GEMMs multiply transposed,
yᵀ = Wᵀ xᵀ, so that tokens are the short side of the tensor cores' instructions. GEMM 1 has gate and up of the
same columns, so the activation happens where the sums are. Programs behind the last tile end at once.
"""

import triton
import triton.language as tl

from .activation import activate
from .dequant import weight_tile

TILES_AT_ONCE = tl.constexpr(8)
"""Token tiles that take turns on one block of columns, before the next one's weights are read."""


@triton.jit
def place_of(tiles, N_BLOCKS: tl.constexpr):
    """(token tile, block of columns) of this program, of `tiles` x N_BLOCKS."""
    program = tl.program_id(0)
    together = TILES_AT_ONCE * N_BLOCKS
    first = program // together * TILES_AT_ONCE
    width = tl.minimum(tiles - first, TILES_AT_ONCE)
    return first + program % together % width, program % together // width


@triton.jit
def single_order(columns):
    """Where columns of single scales and of a bias lie: per 32, 8a + 2i + b is at 8i + 2a + b."""
    c = columns % 32
    return columns - c + (c // 2 % 4) * 8 + (c // 8) * 2 + c % 2


@triton.jit
def of_columns(values, n, BLOCK_N: tl.constexpr):
    """float32 [BLOCK_N, 1]: an expert's single scales or biases, of columns from n on."""
    columns = single_order(n + tl.arange(0, BLOCK_N))
    return tl.load(values + columns).to(tl.float32)[:, None]


@triton.jit
def sums_of(
    x,
    rows,
    here,
    column_stride,
    qweight,
    scales,
    zero_points,
    sort_order,
    expert,
    n,
    SIZE_K: tl.constexpr,
    SIZE_N: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    GATED: tl.constexpr,
    TOKEN_TILE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """float32 [BLOCK_N, TOKEN_TILE] twice: columns from n on, and where GATED those of the second half.

    rows int64 [TOKEN_TILE] is where each token's row of x begins, `here` whether there is one, expert int64.
    """
    GROUPS: tl.constexpr = SIZE_K // GROUP
    qweight += expert * (SIZE_K // 16 * (SIZE_N * BITS // 2))
    scales += expert * (GROUPS * SIZE_N)
    if zero_points is not None:
        zero_points += expert * (GROUPS * (SIZE_N * BITS // 32))
    first = tl.zeros((BLOCK_N, TOKEN_TILE), tl.float32)
    second = tl.zeros((BLOCK_N, TOKEN_TILE), tl.float32)
    for k in range(0, SIZE_K, BLOCK_K):
        column = k + tl.arange(0, BLOCK_K)
        if sort_order is not None:
            column = tl.load(sort_order + expert * SIZE_K + column)
        place = rows[None, :] + column.to(tl.int64)[:, None] * column_stride
        tokens = tl.load(x + place, mask=here[None, :], other=0.0)
        weights = weight_tile(
            qweight, scales, zero_points, k, n, SIZE_K, SIZE_N, BITS, GROUP, BLOCK_K, BLOCK_N
        )
        first = tl.dot(weights, tokens, first, input_precision="ieee")
        if GATED:
            weights = weight_tile(
                qweight,
                scales,
                zero_points,
                k,
                n + SIZE_N // 2,
                SIZE_K,
                SIZE_N,
                BITS,
                GROUP,
                BLOCK_K,
                BLOCK_N,
            )
            second = tl.dot(weights, tokens, second, input_precision="ieee")
    if GROUP == SIZE_K:  # a single scale of a column, after its sum: so nothing is rounded
        first *= of_columns(scales, n, BLOCK_N)
        if GATED:
            second *= of_columns(scales, n + SIZE_N // 2, BLOCK_N)
    return first, second


@triton.jit(do_not_specialize=["tiles"], do_not_specialize_on_alignment=["topk_weights"])
def first_gemm(
    x,
    row_stride,
    column_stride,
    topk_weights,
    qweight,
    scales,
    zero_points,
    sort_order,
    bias,
    sorted_slots,
    tile_count,
    tile_expert,
    tile_row,
    tile_rows,
    activations,
    tiles,
    alpha,
    limit,
    beta,
    linear_beta,
    SIZE_K: tl.constexpr,
    SIZE_N: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    GATED: tl.constexpr,
    KIND: tl.constexpr,
    TOP_K: tl.constexpr,
    WEIGHT_ON_INPUT: tl.constexpr,
    TOKEN_TILE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """activations [rows, Ip] = activation(x times w13 + bias), by row. Grid [tiles * Ip / BLOCK_N]."""
    WIDTH: tl.constexpr = SIZE_N // 2 if GATED else SIZE_N
    tile, block = place_of(tiles, WIDTH // BLOCK_N)
    if tile >= tl.load(tile_count):
        return
    expert = tl.load(tile_expert + tile).to(tl.int64)
    token = tl.arange(0, TOKEN_TILE)
    here = token < tl.load(tile_rows + tile)
    row = tl.load(tile_row + tile) + token
    slot = tl.load(sorted_slots + row, mask=here, other=0)
    n = block * BLOCK_N
    gate, up = sums_of(
        x,
        (slot // TOP_K).to(tl.int64) * row_stride,
        here,
        column_stride,
        qweight,
        scales,
        zero_points,
        sort_order,
        expert,
        n,
        SIZE_K,
        SIZE_N,
        BITS,
        GROUP,
        GATED,
        TOKEN_TILE,
        BLOCK_N,
        BLOCK_K,
    )
    if WEIGHT_ON_INPUT:  # the product is linear in x
        weight = tl.load(topk_weights + slot, mask=here, other=0.0).to(tl.float32)[None, :]
        gate *= weight
        up *= weight
    if bias is not None:
        gate += of_columns(bias + expert * SIZE_N, n, BLOCK_N)
        if GATED:
            up += of_columns(bias + expert * SIZE_N, WIDTH + n, BLOCK_N)
    inner = tl.trans(activate(gate, up, alpha, limit, beta, linear_beta, KIND))
    place = row.to(tl.int64)[:, None] * WIDTH + n + tl.arange(0, BLOCK_N)[None, :]
    tl.store(activations + place, inner.to(activations.dtype.element_ty), mask=here[:, None])


@triton.jit(do_not_specialize=["tiles"], do_not_specialize_on_alignment=["topk_weights"])
def second_gemm(
    activations,
    topk_weights,
    qweight,
    scales,
    zero_points,
    bias,
    sorted_slots,
    tile_count,
    tile_expert,
    tile_row,
    tile_rows,
    w2_output,
    tiles,
    SIZE_K: tl.constexpr,
    SIZE_N: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    WEIGHT_ON_INPUT: tl.constexpr,
    TOKEN_TILE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """w2_output [M*T, H] = (activations times w2 + bias) * router weight, by slot.

    Grid [tiles * H / BLOCK_N].
    """
    tile, block = place_of(tiles, SIZE_N // BLOCK_N)
    if tile >= tl.load(tile_count):
        return
    expert = tl.load(tile_expert + tile).to(tl.int64)
    token = tl.arange(0, TOKEN_TILE)
    here = token < tl.load(tile_rows + tile)
    row = tl.load(tile_row + tile) + token
    slot = tl.load(sorted_slots + row, mask=here, other=0)
    n = block * BLOCK_N
    y, _ = sums_of(
        activations,
        row.to(tl.int64) * SIZE_K,
        here,
        1,
        qweight,
        scales,
        zero_points,
        None,
        expert,
        n,
        SIZE_K,
        SIZE_N,
        BITS,
        GROUP,
        False,
        TOKEN_TILE,
        BLOCK_N,
        BLOCK_K,
    )
    if bias is not None:
        y += of_columns(bias + expert * SIZE_N, n, BLOCK_N)
    if not WEIGHT_ON_INPUT:
        y *= tl.load(topk_weights + slot, mask=here, other=0.0).to(tl.float32)[None, :]
    place = slot.to(tl.int64)[:, None] * SIZE_N + n + tl.arange(0, BLOCK_N)[None, :]
    tl.store(w2_output + place, tl.trans(y).to(w2_output.dtype.element_ty), mask=here[:, None])
