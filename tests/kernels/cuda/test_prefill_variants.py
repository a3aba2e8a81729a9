"""The prefill GEMMs compile for Hopper without a GPU: every two policies, every tile, nothing serialized."""

from collections.abc import Sequence
from typing import Any

from marlin_moe.kernels.backends.prefill import build_spec, route_spec
from marlin_moe.kernels.jit.build import CompileReport, compile_all
from marlin_moe.kernels.plan.prefill import TILE_SHAPES, GemmVariant
from pairwise import missing, pairwise

FACTORS: dict[str, list[Any]] = {
    "tile": list(TILE_SHAPES),
    "fp16": [False, True],
    "bits": [4, 8],
    "group": [0, 32, 64, 128],
    "symmetric": [True, False],
    "second": [False, True],
    "gated": [True, False],
}
MOST_VARIANTS = 40
MOST_SPILL_BYTES = {32: 256, 48: 256, 64: 64, 80: 64, 104: 64, 144: 64}
"""Stores and loads of a kernel together, in its code, by its tile.

The producer warps have 40 registers (32 with tiles of up to 48, whose others have 104), and what they keep
from one work item to the next goes to local memory; so do addresses of an epilogue; nothing in the loops
over K does.
"""


def exists(row: dict[str, Any]) -> bool:
    """Nothing in GEMM 2 depends on the gate."""
    return bool(row["gated"] or not row["second"])


VARIANTS = [GemmVariant(**row) for row in pairwise(FACTORS, allowed=exists)]


def test_the_list_covers_every_two_policies() -> None:
    rows = [{name: getattr(variant, name) for name in FACTORS} for variant in VARIANTS]
    possible = [row for row in missing(FACTORS, rows) if exists({"gated": True, "second": False} | row)]
    assert possible == []
    assert len({variant.label for variant in VARIANTS}) == len(VARIANTS) <= MOST_VARIANTS


def test_every_variant_compiles_for_hopper() -> None:
    check(compile_all(build_spec(variant) for variant in VARIANTS), VARIANTS)


def test_the_ends_compile_for_hopper() -> None:
    for report in compile_all(route_spec(fp16=fp16) for fp16 in (False, True)):
        assert report.spill_store_bytes == 0
        assert report.warnings == ()


def check(reports: Sequence[CompileReport], variants: Sequence[GemmVariant]) -> None:
    problems = []
    for report, variant in zip(reports, variants, strict=True):
        spilled = report.spill_store_bytes + report.spill_load_bytes
        most = MOST_SPILL_BYTES[variant.tile.rows]
        if spilled > most:
            problems.append(f"{report.name}: {spilled} bytes spilled, bound {most}")
        problems += [f"{report.name}: {text}" for text in report.warnings]
    assert not problems, "\n".join(problems)
