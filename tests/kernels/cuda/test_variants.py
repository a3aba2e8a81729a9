"""A named list of variants of the CUDA kernel compiles for every architecture, without a GPU."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from cuda_variants import COVERING, VARIANTS, variant_named
from marlin_moe.kernels.backends.cuda_moe import build_spec
from marlin_moe.kernels.jit.build import CompileReport, compile_all
from marlin_moe.kernels.jit.toolkit import installed_toolkit
from marlin_moe.kernels.plan.cuda_moe import TOKEN_TILES, MoEVariant
from pairwise import missing

MOST_VARIANTS = 40
MOST_SPILL_BYTES = {8: 512, 16: 64, 32: 64}
"""Stores and loads of a kernel together, in its code, by its token tile.

A tile of 8 is held to 128 registers, so that two blocks share a multiprocessor and hide each other's waits;
with int8 on both sides that costs up to 448 bytes. Wider tiles have 255 registers, and only a few addresses
of the epilogue go to local memory. More would mean that the main loop itself spills.
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


def rows(variants: Sequence[MoEVariant]) -> list[dict[str, object]]:
    return [{name: getattr(variant, name) for name in FACTORS} for variant in variants]


def test_the_list_covers_every_two_policies() -> None:
    assert set(FACTORS) == {name.lower() for name in VARIANTS[0].constants}
    assert len(VARIANTS) == len(set(VARIANTS)) <= MOST_VARIANTS
    assert missing(FACTORS, rows(VARIANTS)) == []
    for matrix in ("w13", "w2"):
        parts = [f"{matrix}_{part}" for part in ("bits", "group", "symmetric")]
        assert len({tuple(row[part] for part in parts) for row in rows(VARIANTS)}) == 2 * 4 * 2


def test_the_short_list_covers_every_policy() -> None:
    assert set(COVERING) <= set(VARIANTS)
    for name, values in FACTORS.items():
        assert {row[name] for row in rows(COVERING)} == set(values), name


def test_labels_are_names() -> None:
    assert len({variant.label for variant in VARIANTS}) == len(VARIANTS)


def test_every_variant_compiles_for_hopper() -> None:
    check(compile_all(build_spec(variant, "sm_90a") for variant in VARIANTS))


@pytest.mark.parametrize("arch", OTHER_ARCHS)
def test_the_short_list_compiles_for(arch: str) -> None:
    if int(arch.removeprefix("sm_").rstrip("a")) not in installed_toolkit().compute_capabilities:
        pytest.skip(f"NVRTC {installed_toolkit().version} does not know {arch}")
    check(compile_all(build_spec(variant, arch) for variant in COVERING))


def check(reports: Sequence[CompileReport]) -> None:
    """No warnings, and no more spills than the bound."""
    problems = []
    for report in reports:
        spilled = report.spill_store_bytes + report.spill_load_bytes
        most = MOST_SPILL_BYTES[variant_named(report.name).token_tile]
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
