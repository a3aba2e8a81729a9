"""The CUDA backend's plan: which kernels run a call, and the buffers of all of them. Integers only."""

import torch

from . import decode, prefill
from .buffers import Need, WorkspacePlan, overlaid, planned_rows
from .paths import Path, RowRange, choose_path, row_ranges
from .prefill import PrefillVariant
from .problem import LayerFacts, MoEProblem
from .variant import COLUMNS, KernelVariant, MoEVariant, form_of

Variant = KernelVariant | PrefillVariant
"""What runs a pass: one kernel, or those of the prefill path."""

TOKEN_TILES = (8, 16, 32)
SPLIT_ROUNDS = 2
BLOCKS_PER_SM = MoEVariant.blocks_per_sm  # the most of any kernel
FP32_ROWS = 2048  # up to so many rows the slots are kept in float32: a rounding less where it costs nothing


def choose_variant(facts: LayerFacts, *, rows: int, arch: str) -> Variant:
    """What runs `rows` rows on an architecture."""
    match choose_path(facts, rows=rows, arch=arch):
        case Path.DECODE:
            return decode.variant(facts, token_tile=decode.token_tile(facts, rows=rows), arch=arch)
        case Path.GENERAL:
            return choose_general(facts, rows=rows)
        case Path.PREFILL:
            return prefill.choose_variant(facts, rows=rows)


def choose_general(facts: LayerFacts, *, rows: int) -> MoEVariant:
    """The general path's kernel: the smallest token tile that holds an expert's average share."""
    share = -(-rows // facts.num_global_experts)
    tile = next((tile for tile in TOKEN_TILES if share <= tile), TOKEN_TILES[-1])
    return MoEVariant(**form_of(facts), token_tile=tile)


def variants(facts: LayerFacts, arch: str) -> tuple[Variant, ...]:
    """All that `choose_variant` can choose for a layer on an architecture."""
    return possible_variants(facts, None, arch)


def possible_variants(facts: LayerFacts, rows: int | None, arch: str) -> tuple[Variant, ...]:
    """All that calls of 1 .. `rows` rows can choose, of any number where None; path after path."""
    ranges = row_ranges(facts, arch=arch, most=rows)
    return tuple(variant for part in ranges for variant in _variants_of(facts, part, arch))


def _variants_of(facts: LayerFacts, part: RowRange, arch: str) -> tuple[Variant, ...]:
    """What the rows of a range choose, by token tile."""
    found: tuple[KernelVariant, ...]
    match part.path:
        case Path.PREFILL:
            return prefill.variants(facts, first=part.first, last=part.last)
        case Path.DECODE:
            found = decode.variants(facts, arch)
        case Path.GENERAL:
            found = tuple(MoEVariant(**form_of(facts), token_tile=tile) for tile in TOKEN_TILES)
    ends = [choose_variant(facts, rows=rows, arch=arch) for rows in (part.first, part.last) if rows]
    last = len(found) if part.last is None else found.index(ends[-1]) + 1
    return found[found.index(ends[0]) : last]


def most_slot_parts(facts: LayerFacts, *, rows: int, arch: str) -> int:
    """How many parts of K w2_output has room for, in float32 and for `rows` rows.

    The room is that of a plan for `rows` rows on the same architecture; plans for more rows have no less.
    """
    return max(1, _slot_bytes(facts, rows, arch) // (4 * rows * facts.hidden_size))


def split_capacity(blocks: int) -> int:
    """Tiles of GEMM 1 that may keep their sums where K is split: some rounds over the grid of a device."""
    return SPLIT_ROUNDS * blocks


def plan_workspace(facts: LayerFacts, *, rows: int, blocks: int, arch: str) -> WorkspacePlan:
    """The buffers of a layer for `rows` rows (at most 2**31 - 1 are planned) on a device.

    `blocks` is the most that run at once on the device, `arch` its architecture (`sm_90a`). A call of any
    number of rows up to `rows` finds in them what its path needs: where paths share a name, the most of them.
    Only activations and w2_output grow large.
    """
    rows = planned_rows(rows)
    needs = [_buffers(facts, rows=rows, blocks=blocks, arch=arch)]
    if any(part.path is Path.PREFILL for part in row_ranges(facts, arch=arch, most=rows)):
        needs.append(prefill.buffers(facts, rows=rows))
    return WorkspacePlan.lay_out(f"CUDA workspace of {facts}", rows=rows, buffers=overlaid(*needs))


def _buffers(facts: LayerFacts, *, rows: int, blocks: int, arch: str) -> list[Need]:
    """What the general path and the decode path need.

    buffer          dtype    shape        holds
    tile_count      int32    [1]
    sorted_slots    int32    [rows]       token * T + slot of each row, rows of one expert together
    slot_is_here    int32    [rows]       1 where a slot reaches an expert of this rank
    tile_expert     int32    [tiles]      token tiles: expert, first row, rows
    tile_row        int32    [tiles]
    tile_rows       int32    [tiles]
    activations     x.dtype  [rows, Ip]
    w2_output       x.dtype  [≥ rows, H]  by slot; few rows may be float32, and several parts of K, instead
    split_sums      float32  [sums]       sums of GEMM 1 where K is split over blocks
    """
    tiles = min(rows, facts.num_experts + rows // TOKEN_TILES[0])
    sums = max(
        split_capacity(blocks) * TOKEN_TILES[-1] * COLUMNS,
        decode.first_sums_floats(facts, rows=rows, blocks=blocks),
    )
    slot_rows = _slot_bytes(facts, rows, arch) // (facts.hidden_size * facts.scales_dtype.itemsize)
    return [
        ("tile_count", torch.int32, (1,)),
        ("sorted_slots", torch.int32, (rows,)),
        ("slot_is_here", torch.int32, (rows,)),
        ("tile_expert", torch.int32, (tiles,)),
        ("tile_row", torch.int32, (tiles,)),
        ("tile_rows", torch.int32, (tiles,)),
        ("activations", facts.scales_dtype, (rows, facts.padded_intermediate_size)),
        ("w2_output", facts.scales_dtype, (slot_rows, facts.hidden_size)),
        ("split_sums", torch.float32, (sums,)),
    ]


def _slot_bytes(facts: LayerFacts, rows: int, arch: str) -> int:
    """Bytes of w2_output for `rows` rows; no less for more rows."""
    general = max(rows, 2 * FP32_ROWS) * facts.hidden_size * facts.scales_dtype.itemsize
    return max(general, decode.slot_sums_bytes(facts, rows=rows, arch=arch))


def reason_against(problem: MoEProblem) -> str | None:
    """Why the CUDA backend does not run a problem, or None; facts alone, no device is asked."""
    facts = problem.layer
    if problem.device_type != "cuda":
        return f"the layer is on {problem.device_type}"
    if problem.x_dtype not in (torch.bfloat16, torch.float16):
        return f"x is {_name(problem.x_dtype)}, and tensor cores take bfloat16 or float16"
    if problem.x_dtype != facts.scales_dtype:
        return (
            f"x is {_name(problem.x_dtype)} and the scales are {_name(facts.scales_dtype)}; "
            f"load the layer with dtype={problem.x_dtype}"
        )
    return None


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
