"""The named variants of the CUDA kernels that are compiled where there is no GPU.

`VARIANTS` are of the general path: every two values of different constants meet in one of them, and each of
w13 and w2 comes in every format. Of the decode path `DECODE_NAMES` have every format of each matrix.
A name is the variant's label: w4g128 is int4 in groups of 128, g0 one scale per column, z asymmetric, s
act-order.
"""

from __future__ import annotations

import re

from marlin_moe.kernels.plan.decode import DecodeVariant, resources
from marlin_moe.kernels.plan.variant import KernelVariant, MoEVariant

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
DECODE_NAMES = """
decode bf16 w4g32-w4g64z tile 8 of 7168 x 256
decode fp16 w4g32z-w8g64 tile 16 of 2048 x 768
decode bf16 w4g64s-w4g32z tile 32 of 4096 x 14336
decode fp16 w4g64zs-w8g32 ungated tile 8 of 6144 x 192
decode fp16 w4g128-w8g0z tile 16 of 512 x 64
decode fp16 w4g128z-w4g0 tile 32 of 7168 x 256
decode bf16 w4g0s-w8g128z ungated tile 8 of 2048 x 768
decode fp16 w4g0zs-w4g128 tile 16 of 4096 x 14336
decode bf16 w8g32-w8g64z tile 32 of 6144 x 192
decode fp16 w8g32z-w4g64 ungated tile 8 of 512 x 64
decode bf16 w8g64s-w8g32z tile 16 of 7168 x 256
decode bf16 w8g64zs-w4g32 tile 32 of 2048 x 768
decode bf16 w8g128-w4g0z ungated tile 8 of 4096 x 14336
decode fp16 w8g128z-w8g0 tile 16 of 6144 x 192
decode bf16 w8g0s-w4g128z tile 32 of 7168 x 256
decode fp16 w8g0zs-w8g128 tile 8 of 7168 x 256
"""
DECODE_COVERING_NAMES = """
decode bf16 w4g32-w4g64z tile 8 of 7168 x 256
decode fp16 w4g64zs-w8g32 ungated tile 8 of 6144 x 192
decode fp16 w4g0zs-w4g128 tile 16 of 4096 x 14336
decode bf16 w8g64s-w8g32z tile 16 of 7168 x 256
decode bf16 w8g0s-w4g128z tile 32 of 7168 x 256
"""
MATRIX = r"w(\d)g(\d+)(z?)"
LABEL = re.compile(
    rf"(moe|decode) (bf16|fp16) {MATRIX}(s?)-{MATRIX}( ungated)? tile (\d+)(?: of (\d+) x (\d+))?"
)


def variant_named(label: str, arch: str = "sm_90a") -> KernelVariant:
    """The variant with this label, on an architecture where that makes a difference."""
    match = LABEL.fullmatch(label)
    if match is None:
        raise ValueError(f"no label of a variant: {label!r}")
    path, dtype, bits, group, zeros, ordered, w2_bits, w2_group, w2_zeros, ungated, tile, h, i = (
        match.groups()
    )
    form = {
        "fp16": dtype == "fp16",
        "w13_bits": int(bits),
        "w13_group": int(group),
        "w13_symmetric": not zeros,
        "w13_sorted": bool(ordered),
        "w2_bits": int(w2_bits),
        "w2_group": int(w2_group),
        "w2_symmetric": not w2_zeros,
        "gated": ungated is None,
        "token_tile": int(tile),
    }
    if path == "moe":
        return MoEVariant(**form)
    return DecodeVariant(**form, hidden=int(h), intermediate=int(i), **resources(int(tile), arch))


def decode_variants(names: str, arch: str) -> tuple[KernelVariant, ...]:
    """The variants of some lines of names on an architecture."""
    return tuple(variant_named(name, arch) for name in names.strip().splitlines())


VARIANTS = tuple(variant_named(name) for name in NAMES.strip().splitlines())
"""All that are compiled for the architecture that this is made for."""

COVERING = tuple(variant_named(name) for name in COVERING_NAMES.strip().splitlines())
"""The few that are compiled for every other one: each value of each constant is in one of them."""
