"""The named variants of `cuda/moe.cu` that are compiled where there is no GPU: `VARIANTS`, `COVERING`.

Every two values of different constants meet in one of them, and each of w13 and w2 comes in every format.
A name is the variant's label: w4g128 is int4 in groups of 128, g0 one scale per column, z asymmetric, s
act-order.
"""

from __future__ import annotations

import re

from marlin_moe.kernels.plan.cuda_moe import MoEVariant

NAMES = """
moe bf16 w4g32-w4g32 tile 8
moe bf16 w4g32-w4g32 tile 16
moe bf16 w4g32-w4g32 tile 32
moe bf16 w4g128-w4g128 tile 8
moe bf16 w4g128-w4g128 tile 32
moe bf16 w4g128z-w4g128z tile 16
moe bf16 w8g128-w8g128 tile 16
moe bf16 w4g0-w4g0 tile 8
moe bf16 w4g64z-w4g64z tile 32
moe fp16 w4g128s-w4g128 tile 8
moe fp16 w8g32zs-w8g0 ungated tile 32
moe fp16 w8g64-w8g32z ungated tile 8
moe fp16 w8g0zs-w8g64z ungated tile 16
moe bf16 w4g64s-w8g64 ungated tile 8
moe bf16 w8g128zs-w4g0z ungated tile 16
moe fp16 w4g0zs-w8g32 ungated tile 8
moe fp16 w8g32s-w8g128z ungated tile 16
moe fp16 w8g64z-w8g0z ungated tile 16
moe bf16 w4g32z-w4g64 tile 32
moe bf16 w8g0s-w4g32z tile 32
moe bf16 w8g128s-w8g64 tile 8
moe bf16 w8g64zs-w8g128 ungated tile 16
moe bf16 w8g128z-w8g32z tile 32
moe fp16 w8g0s-w8g128 ungated tile 32
"""
COVERING_NAMES = """
moe bf16 w4g32-w4g32 tile 8
moe bf16 w4g128z-w4g128z tile 16
moe fp16 w4g128s-w4g128 tile 8
moe fp16 w8g32zs-w8g0 ungated tile 32
moe bf16 w8g64zs-w8g128 ungated tile 16
moe bf16 w8g0s-w4g32z tile 32
moe bf16 w4g64s-w8g64 ungated tile 8
"""
MATRIX = r"w(\d)g(\d+)(z?)"
LABEL = re.compile(rf"moe (bf16|fp16) {MATRIX}(s?)-{MATRIX}( ungated)? tile (\d+)")


def variant_named(label: str) -> MoEVariant:
    """The variant with this label."""
    match = LABEL.fullmatch(label)
    if match is None:
        raise ValueError(f"no label of a variant: {label!r}")
    dtype, bits, group, zeros, ordered, w2_bits, w2_group, w2_zeros, ungated, tile = match.groups()
    return MoEVariant(
        fp16=dtype == "fp16",
        w13_bits=int(bits),
        w13_group=int(group),
        w13_symmetric=not zeros,
        w13_sorted=bool(ordered),
        w2_bits=int(w2_bits),
        w2_group=int(w2_group),
        w2_symmetric=not w2_zeros,
        gated=ungated is None,
        token_tile=int(tile),
    )


VARIANTS = tuple(variant_named(name) for name in NAMES.strip().splitlines())
"""All that are compiled for the architecture that this is made for."""

COVERING = tuple(variant_named(name) for name in COVERING_NAMES.strip().splitlines())
"""The few that are compiled for every other one: each value of each constant is in one of them."""
