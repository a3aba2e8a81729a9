"""A named list of variants of the CUDA kernel compiles for every architecture, without a GPU."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from cuda_variants import (
    COVERING,
    DECODE_COVERING_NAMES,
    DECODE_NAMES,
    VARIANTS,
    decode_variants,
    variant_named,
)
from marlin_moe.kernels.backends.cuda_moe import build_spec
from marlin_moe.kernels.jit.build import CompileReport, compile_all
from marlin_moe.kernels.jit.toolkit import installed_toolkit
from marlin_moe.kernels.plan import decode
from marlin_moe.kernels.plan.cuda_moe import TOKEN_TILES
from marlin_moe.kernels.plan.variant import KernelVariant
from pairwise import missing

MOST_VARIANTS = 40
MOST_SPILL_BYTES = {"moe": {8: 512, 16: 64, 32: 64}, "decode": {8: 32, 16: 192, 32: 128}}
"""Stores and loads of a kernel together, in its code, by its token tile.

The general path: a tile of 8 is held to 128 registers, so that two blocks share a multiprocessor and hide
each other's waits; with int8 on both sides that costs up to 448 bytes. Wider tiles have 255 registers, and
only a few addresses of the epilogue go to local memory. More would mean that the main loop itself spills.
The decode path: two teams of eight warps and their producers have 96 registers each, one team 168. What a
thread knows of its first activation waits in local memory for the barrier; the main loops have all they need.
"""
OTHER_ARCHS = ("sm_80", "sm_86", "sm_89", "sm_100a", "sm_120a")
FACTORS = {
    "fp16": (False, True),
    "w13_bits": (4, 8),
    "w13_group": (0, 32, 64, 128),
    "w13_symmetric": (True, False),
    "w13_sorted": (False, True),
    "w2_bits": (4, 8),
    "w2_group": (0, 32, 64, 128),
    "w2_symmetric": (True, False),
    "gated": (True, False),
    "token_tile": TOKEN_TILES,
}


def rows(variants: Sequence[KernelVariant]) -> list[dict[str, object]]:
    return [{name: getattr(variant, name) for name in FACTORS} for variant in variants]


def test_the_list_covers_every_two_policies() -> None:
    assert set(FACTORS) == {name.lower() for name in VARIANTS[0].constants}
    assert len(VARIANTS) == len(set(VARIANTS))
    assert len(VARIANTS) + len(decode_variants(DECODE_NAMES, "sm_90a")) <= MOST_VARIANTS
    assert missing(FACTORS, rows(VARIANTS)) == []
    for matrix in ("w13", "w2"):
        parts = [f"{matrix}_{part}" for part in ("bits", "group", "symmetric")]
        assert len({tuple(row[part] for part in parts) for row in rows(VARIANTS)}) == 2 * 4 * 2


def test_the_short_list_covers_every_policy() -> None:
    assert set(COVERING) <= set(VARIANTS)
    for name, values in FACTORS.items():
        assert {row[name] for row in rows(COVERING)} == set(values), name


@pytest.mark.parametrize("names", [DECODE_NAMES, DECODE_COVERING_NAMES], ids=["all", "short"])
def test_the_decode_lists_cover_every_policy(names: str) -> None:
    listed = rows(decode_variants(names, "sm_90a"))
    factors = FACTORS | {"token_tile": tuple(decode.TOKEN_TILES)}
    if names == DECODE_COVERING_NAMES:
        factors = {name: values for name, values in factors.items() if not name.endswith("_group")}
    for name, values in factors.items():
        assert {row[name] for row in listed} == set(values), name
    for matrix in ("w13", "w2"):
        parts = [f"{matrix}_{part}" for part in ("bits", "group", "symmetric")]
        assert len({tuple(row[part] for part in parts) for row in listed}) == len(listed)


def test_labels_are_names() -> None:
    named = (*VARIANTS, *decode_variants(DECODE_NAMES, "sm_90a"))
    assert len({variant.label for variant in named}) == len(named)
    assert all(variant_named(variant.label) == variant for variant in named)


def test_every_variant_compiles_for_hopper() -> None:
    listed = (*VARIANTS, *decode_variants(DECODE_NAMES, "sm_90a"))
    check(compile_all(build_spec(variant, "sm_90a") for variant in listed))


@pytest.mark.parametrize("arch", OTHER_ARCHS)
def test_the_short_list_compiles_for(arch: str) -> None:
    if int(arch.removeprefix("sm_").rstrip("a")) not in installed_toolkit().compute_capabilities:
        pytest.skip(f"NVRTC {installed_toolkit().version} does not know {arch}")
    listed = (*COVERING, *decode_variants(DECODE_COVERING_NAMES, arch))
    check(compile_all(build_spec(variant, arch) for variant in listed))


def check(reports: Sequence[CompileReport]) -> None:
    """No warnings, and no more spills than the bound."""
    problems = []
    for report in reports:
        spilled = report.spill_store_bytes + report.spill_load_bytes
        variant = variant_named(report.name)
        most = MOST_SPILL_BYTES[variant.kernel][variant.token_tile]
        if spilled > most:
            problems.append(f"{report.name} for {report.arch}: {spilled} bytes spilled, bound {most}")
        problems += [f"{report.name} for {report.arch}: {text}" for text in report.warnings]
    assert not problems, "\n".join(problems)


def test_the_check_sees_spills_and_warnings() -> None:
    good = CompileReport(
        name=VARIANTS[1].label,
        arch="sm_80",
        key="",
        cached=False,
        seconds=1.0,
        registers=255,
        spill_store_bytes=32,
        spill_load_bytes=32,
        static_smem_bytes=0,
        cubin_bytes=1,
        warnings=(),
    )
    check([good])
    with pytest.raises(AssertionError, match="tile 16 for sm_80: 65 bytes spilled"):
        check([good, replace(good, spill_load_bytes=33)])
    with pytest.raises(AssertionError, match="tile 16 for sm_80: a warning"):
        check([replace(good, warnings=("a warning",))])
