"""The Triton backend's plan: which tiles its kernels take, and their buffers. Integers only."""

from dataclasses import dataclass

import torch

from .buffers import WorkspacePlan, planned_rows
from .cuda_moe import FP32_ROWS
from .problem import LayerFacts, MoEProblem

LEAST_COLUMNS = 64  # a Marlin tile's, which divides every matrix
COLUMNS_PER_WARP = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiles:
    """What a program of the GEMMs takes.

    Attributes:
        tokens: rows of one expert.
        columns: of the matrix (of each half where gated), where its width allows.
        depth: rows of the matrix (along K) in one step.
        num_stages: steps that are in flight.
    """

    tokens: int
    columns: int
    depth: int = 64
    num_stages: int = 3

    def columns_of(self, width: int) -> int:
        """The columns of a program where there are `width`."""
        return self.columns if width % self.columns == 0 else LEAST_COLUMNS

    def num_warps(self, width: int) -> int:
        """Four for the 64 columns of one wgmma."""
        return self.columns_of(width) // COLUMNS_PER_WARP


TILES = (
    Tiles(tokens=16, columns=64, num_stages=5),
    Tiles(tokens=32, columns=64, num_stages=4),
    Tiles(tokens=64, columns=128),
)
"""By an expert's average share of the rows: the first that holds it, else the last."""


def choose_tiles(facts: LayerFacts, *, rows: int) -> Tiles:
    """The tiles of a pass of `rows` rows."""
    share = -(-rows // facts.num_global_experts)
    return next((tiles for tiles in TILES if share <= tiles.tokens), TILES[-1])


def most_tiles(facts: LayerFacts, *, rows: int, tokens: int) -> int:
    """The most token tiles that `rows` rows need, however they are spread."""
    return min(rows, facts.num_experts + rows // tokens)


def slots_dtype(facts: LayerFacts, *, rows: int) -> torch.dtype:
    """How `rows` slots are kept until they are summed."""
    return torch.float32 if rows <= FP32_ROWS else facts.scales_dtype


def plan_workspace(facts: LayerFacts, *, rows: int) -> WorkspacePlan:
    """The buffers of a layer for `rows` rows (at most 2**31 - 1 are planned).

    buffer          dtype    shape        holds
    expert_rows     int32    [E]          rows of each expert
    tile_count      int32    [1]
    sorted_slots    int32    [rows]       token * T + slot of each row, sorted by expert
    tile_expert     int32    [tiles]      token tiles: expert, first row, rows
    tile_row        int32    [tiles]
    tile_rows       int32    [tiles]
    activations     x.dtype  [rows, Ip]   by row
    w2_output       x.dtype  [≥ rows, H]  by slot; few rows are float32 instead (`slots_dtype`)
    """
    rows = planned_rows(rows)
    tiles = most_tiles(facts, rows=rows, tokens=TILES[0].tokens)
    slot_rows = max(rows, min(rows, FP32_ROWS) * torch.float32.itemsize // facts.scales_dtype.itemsize)
    return WorkspacePlan.lay_out(
        f"Triton workspace of {facts}",
        rows=rows,
        buffers=(
            ("expert_rows", torch.int32, (facts.num_experts,)),
            ("tile_count", torch.int32, (1,)),
            ("sorted_slots", torch.int32, (rows,)),
            ("tile_expert", torch.int32, (tiles,)),
            ("tile_row", torch.int32, (tiles,)),
            ("tile_rows", torch.int32, (tiles,)),
            ("activations", facts.scales_dtype, (rows, facts.padded_intermediate_size)),
            ("w2_output", facts.scales_dtype, (slot_rows, facts.hidden_size)),
        ),
    )


def reason_against(problem: MoEProblem, *, interpreted: bool) -> str | None:
    """Why the Triton backend does not run a problem, or None; facts alone, no device is asked."""
    if problem.device_type != "cuda" and not (interpreted and problem.device_type == "cpu"):
        return f"the layer is on {problem.device_type}, and its kernels need a GPU (or TRITON_INTERPRET=1)"
    return reason_against_dtypes(problem.x_dtype, problem.layer.scales_dtype, interpreted=interpreted)


def reason_against_dtypes(x: torch.dtype, scales: torch.dtype, *, interpreted: bool) -> str | None:
    """Why it does not run an x and scales of these dtypes, or None."""
    if interpreted and torch.bfloat16 in (x, scales):
        return "Triton's interpreter has no bfloat16 arithmetic"
    if x == torch.float32 and not interpreted:
        return "x is float32, and tensor cores take bfloat16 or float16"
    if x != scales:
        return f"x is {_name(x)} and the scales are {_name(scales)}; load the layer with dtype={x}"
    return None


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
