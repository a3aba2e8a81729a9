"""The CUDA backend's plan: which variant of `cuda/moe.cu` runs a call, and its buffers. Integers only."""

from dataclasses import dataclass

import torch

from ..errors import WorkspaceError
from .buffers import WorkspacePlan
from .problem import LayerFacts, MatrixFacts, MoEProblem

TOKEN_TILES = (8, 16, 32)
MAX_ROWS = 2**31 - 1  # slot numbers are int32; more rows run in chunks
THREADS = 256
CHUNK_K = 256
COLUMNS = 128  # of a tile's sums
SPLIT_ROUNDS = 2
BLOCKS_PER_SM = 2
FP32_ROWS = 2048  # up to so many rows the slots are kept in float32: a rounding less where it costs nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class MoEVariant:
    """One binary of `cuda/moe.cu`: everything that is a constant in it."""

    fp16: bool
    w13_bits: int
    w13_group: int
    w13_symmetric: bool
    w13_sorted: bool
    w2_bits: int
    w2_group: int
    w2_symmetric: bool
    gated: bool
    token_tile: int

    @property
    def constants(self) -> dict[str, int | bool]:
        """The constants by their names in the source; a group of 0 is one scale per column."""
        return {name.upper(): getattr(self, name) for name in self.__slots__}

    @property
    def label(self) -> str:
        """What people call it: `moe fp16 w4g128-w8g0z tile 8`; z is asymmetric, s act-order."""
        matrices = (
            f"w{bits}g{group}{'' if symmetric else 'z'}{'s' if ordered else ''}"
            for bits, group, symmetric, ordered in (
                (self.w13_bits, self.w13_group, self.w13_symmetric, self.w13_sorted),
                (self.w2_bits, self.w2_group, self.w2_symmetric, False),
            )
        )
        kind = "" if self.gated else " ungated"
        return f"moe {'fp16' if self.fp16 else 'bf16'} {'-'.join(matrices)}{kind} tile {self.token_tile}"

    def smem_bytes(self, *, num_experts: int) -> int:
        """Dynamic shared memory of a block: the counts, two chunks of tokens, or a tile's sums."""
        tokens = 2 * self.token_tile * (CHUNK_K + 8) * 2
        sums = COLUMNS * (self.token_tile + 1) * 4
        parts = COLUMNS * self.token_tile * 4
        return max(tokens, sums, parts, 4 * num_experts)


def choose_variant(facts: LayerFacts, *, rows: int) -> MoEVariant:
    """The variant for `rows` rows: the smallest token tile that holds an expert's average share."""
    share = -(-rows // facts.num_global_experts)
    tile = next((tile for tile in TOKEN_TILES if share <= tile), TOKEN_TILES[-1])
    return variant(facts, token_tile=tile)


def variants(facts: LayerFacts) -> tuple[MoEVariant, ...]:
    """All that `choose_variant` can choose for a layer."""
    return tuple(variant(facts, token_tile=tile) for tile in TOKEN_TILES)


def variant(facts: LayerFacts, *, token_tile: int) -> MoEVariant:
    """The layer's variant with a token tile."""
    return MoEVariant(
        fp16=facts.scales_dtype == torch.float16,
        w13_bits=facts.w13.bits,
        w13_group=_group(facts.w13),
        w13_symmetric=not facts.w13.zero_points,
        w13_sorted=facts.w13.sort_order,
        w2_bits=facts.w2.bits,
        w2_group=_group(facts.w2),
        w2_symmetric=not facts.w2.zero_points,
        gated=facts.gated,
        token_tile=token_tile,
    )


def split_capacity(blocks: int) -> int:
    """Tiles of GEMM 1 that may keep their sums where K is split: some rounds over the grid of a device."""
    return SPLIT_ROUNDS * blocks


def plan_workspace(facts: LayerFacts, *, rows: int, blocks: int) -> WorkspacePlan:
    """The buffers of a layer for `rows` rows (at most 2**31 - 1 are planned) on a device.

    `blocks` is the most that run at once on the device. Only activations and w2_output grow large.

    buffer          dtype    shape        holds
    tile_count      int32    [1]
    sorted_slots    int32    [rows]       token * T + slot of each row, rows of one expert together
    slot_is_here    int32    [rows]       1 where a slot reaches an expert of this rank
    tile_expert     int32    [tiles]      token tiles: expert, first row, rows
    tile_row        int32    [tiles]
    tile_rows       int32    [tiles]
    activations     x.dtype  [rows, Ip]
    w2_output       x.dtype  [rows, H]    by slot; up to FP32_ROWS rows may be float32 instead
    split_sums      float32  [tiles, …]   sums of GEMM 1 where K is split over blocks
    """
    if rows < 1:
        raise WorkspaceError(
            f"workspace: expected at least one row, got {rows}. Give max_tokens and top_k from 1 on."
        )
    rows = min(rows, MAX_ROWS)
    tiles = min(rows, facts.num_experts + rows // TOKEN_TILES[0])
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
            ("w2_output", facts.scales_dtype, (max(rows, 2 * FP32_ROWS), facts.hidden_size)),
            ("split_sums", torch.float32, (split_capacity(blocks), TOKEN_TILES[-1], COLUMNS)),
        ),
    )


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


def _group(matrix: MatrixFacts) -> int:
    return 0 if matrix.num_groups == 1 else matrix.size_k // matrix.num_groups


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
