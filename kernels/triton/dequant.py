"""Marlin words, scales and zero points to a tile of weights, by reshaping and reordering axes alone.

A tile of BLOCK_K rows and BLOCK_N columns is, as it lies in memory and in the words (`layout`),

    q [groups, r, c, q, m, j, odd, half, k8]    row 32 group + 16 r + 8 k8 + 2 m + odd
                                                column 64 c + 16 j + 8 half + q

where r counts the two k-tiles of 32 rows and c the blocks of 64 columns. Scales and zero points have the axes
of columns, so they are read as they lie too. 32 is the smallest group: larger ones are read more than once.
What a thread loads is then what a thread of a tensor core's instruction wants, with the weights on its left.
"""

import triton
import triton.language as tl

GROUP_ROWS = tl.constexpr(32)


@triton.jit
def weight_tile(
    qweight,
    scales,
    zero_points,
    k,
    n,
    SIZE_K: tl.constexpr,
    SIZE_N: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """[BLOCK_N, BLOCK_K] of the scales' dtype: (q - zero) * scale of rows from k and columns from n on.

    The three pointers are those of one expert. GROUP is SIZE_K where there is one scale per column: that is
    left out, and the numbers are exact.
    """
    TYPE: tl.constexpr = scales.dtype.element_ty
    ROWS: tl.constexpr = BLOCK_K // 16
    WORDS: tl.constexpr = BLOCK_N * BITS // 2
    rows = k // 16 + tl.arange(0, ROWS)
    words = n * BITS // 2 + tl.arange(0, WORDS)
    packed = tl.load(qweight + rows[:, None] * (SIZE_N * BITS // 2) + words[None, :])
    q = (packed[:, :, None] >> (BITS * tl.arange(0, 32 // BITS))[None, None, :]) & (2**BITS - 1)
    if BITS == 8:  # a word's bytes are (odd, k8), and half is the last bit of its number
        q = q.reshape(ROWS, WORDS // 2, 2, 2, 2).permute(0, 1, 3, 2, 4)
    q = q.reshape(ROWS // 2, 2, BLOCK_N // 64, 8, 4, 4, 2, 2, 2)

    group = (k + GROUP_ROWS * tl.arange(0, ROWS // 2)) // GROUP
    if zero_points is None:
        weights = as_number(q, BITS, TYPE) - (base_of(BITS, TYPE) + 2 ** (BITS - 1))
    else:
        zero = zero_tile(zero_points, group, n, SIZE_N, BITS, BLOCK_N)
        weights = as_number(q, BITS, TYPE) - as_number(zero, BITS, TYPE)
    weights = weights.to(TYPE)
    if GROUP != SIZE_K:
        weights *= scale_tile(scales, group, n, SIZE_N, BLOCK_N)
    return weights.permute(2, 5, 7, 3, 0, 1, 8, 4, 6).reshape(BLOCK_N, BLOCK_K)


@triton.jit
def as_number(q, BITS: tl.constexpr, TYPE: tl.constexpr):
    """q plus `base_of`, exact, of TYPE where that needs no conversion, else float32.

    Below the exponent of 1024 (float16) or 128 (bfloat16) an integer in the mantissa is that number plus it.
    """
    if tl.float16 == TYPE:
        return (q | 0x6400).to(tl.int16).to(TYPE, bitcast=True)
    elif tl.bfloat16 == TYPE and BITS == 4:
        return (q | 0x4300).to(tl.int16).to(TYPE, bitcast=True)
    else:
        return q.to(tl.float32)


@triton.constexpr_function
def base_of(bits, type):
    """What `as_number` adds."""
    if type == tl.float16:
        return 1024.0
    return 128.0 if type == tl.bfloat16 and bits == 4 else 0.0


@triton.jit
def scale_tile(scales, group, n, SIZE_N: tl.constexpr, BLOCK_N: tl.constexpr):
    """[groups, 1, c, q, 1, j, 1, half, 1]."""
    GROUPS: tl.constexpr = group.shape[0]
    columns = n + tl.arange(0, BLOCK_N)
    found = tl.load(scales + group[:, None] * SIZE_N + columns[None, :])
    return found.reshape(GROUPS, 1, BLOCK_N // 64, 8, 1, 4, 1, 2, 1)


@triton.jit
def zero_tile(zero_points, group, n, SIZE_N: tl.constexpr, BITS: tl.constexpr, BLOCK_N: tl.constexpr):
    """int32 [groups, 1, c, q, 1, j, 1, half, 1]: in a word the even ones of 8 (4 for 8 bits) come first."""
    GROUPS: tl.constexpr = group.shape[0]
    words = n * BITS // 32 + tl.arange(0, BLOCK_N * BITS // 32)
    packed = tl.load(zero_points + group[:, None] * (SIZE_N * BITS // 32) + words[None, :])
    zero = (packed[:, :, None] >> (BITS * tl.arange(0, 32 // BITS))[None, None, :]) & (2**BITS - 1)
    zero = zero.reshape(GROUPS, BLOCK_N * BITS // 32, 2, 16 // BITS).permute(0, 1, 3, 2)
    return zero.reshape(GROUPS, 1, BLOCK_N // 64, 8, 1, 4, 1, 2, 1)
