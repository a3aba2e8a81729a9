"""The CUDA backend's plan: which kernel runs a call, and the buffers of all of them. Integers only."""

import torch

from ..errors import WorkspaceError
from . import decode
from .buffers import WorkspacePlan
from .problem import LayerFacts, MoEProblem
from .variant import COLUMNS, KernelVariant, MoEVariant, form_of

TOKEN_TILES = (8, 16, 32)
MAX_ROWS = 2**31 - 1  # slot numbers are int32; more rows run in chunks
SPLIT_ROUNDS = 2
BLOCKS_PER_SM = MoEVariant.blocks_per_sm  # the most of any kernel
FP32_ROWS = 2048  # up to so many rows the slots are kept in float32: a rounding less where it costs nothing


def choose_variant(facts: LayerFacts, *, rows: int, arch: str) -> KernelVariant:
    """The kernel for `rows` rows: the decode path for few, else the general one."""
    return decode.choose_variant(facts, rows=rows, arch=arch) or choose_general(facts, rows=rows)


def choose_general(facts: LayerFacts, *, rows: int) -> MoEVariant:
    """The general path's kernel: the smallest token tile that holds an expert's average share."""
    share = -(-rows // facts.num_global_experts)
    tile = next((tile for tile in TOKEN_TILES if share <= tile), TOKEN_TILES[-1])
    return MoEVariant(**form_of(facts), token_tile=tile)


def variants(facts: LayerFacts, arch: str) -> tuple[KernelVariant, ...]:
    """All that `choose_variant` can choose for a layer on an architecture."""
    least = decode.max_rows(facts) + 1  # what the general path begins with
    first = TOKEN_TILES.index(choose_general(facts, rows=least).token_tile)
    general = (MoEVariant(**form_of(facts), token_tile=tile) for tile in TOKEN_TILES[first:])
    return (*decode.variants(facts, arch), *general)


def possible_variants(facts: LayerFacts, rows: int | None, arch: str) -> tuple[KernelVariant, ...]:
    """All that calls of 1 .. `rows` rows can choose, of any number where None; in order of rows."""
    ordered = variants(facts, arch)
    if rows is None:
        return ordered
    return ordered[: ordered.index(choose_variant(facts, rows=rows, arch=arch)) + 1]


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

    `blocks` is the most that run at once on the device, `arch` its architecture (`sm_90a`). Only activations
    and w2_output grow large.

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
    if rows < 1:
        raise WorkspaceError(
            f"workspace: expected at least one row, got {rows}. Give max_tokens and top_k from 1 on."
        )
    rows = min(rows, MAX_ROWS)
    tiles = min(rows, facts.num_experts + rows // TOKEN_TILES[0])
    sums = max(
        split_capacity(blocks) * TOKEN_TILES[-1] * COLUMNS,
        decode.first_sums_floats(facts, rows=rows, blocks=blocks),
    )
    slot_rows = _slot_bytes(facts, rows, arch) // (facts.hidden_size * facts.scales_dtype.itemsize)
    return WorkspacePlan.lay_out(
        f"CUDA workspace of {facts}",
        rows=rows,
        buffers=(
            ("tile_count", torch.int32, (1,)),
            ("sorted_slots", torch.int32, (rows,)),
            ("slot_is_here", torch.int32, (rows,)),
            ("tile_expert", torch.int32, (tiles,)),
            ("tile_row", torch.int32, (tiles,)),
            ("tile_rows", torch.int32, (tiles,)),
            ("activations", facts.scales_dtype, (rows, facts.padded_intermediate_size)),
            ("w2_output", facts.scales_dtype, (slot_rows, facts.hidden_size)),
            ("split_sums", torch.float32, (sums,)),
        ),
    )


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
