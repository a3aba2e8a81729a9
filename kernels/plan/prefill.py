"""The prefill path's plan: what it runs, variants of `cuda/prefill_gemm.cu`, buffers. Integers only."""

import functools
import math
from dataclasses import dataclass

import torch

from .buffers import Need
from .problem import LayerFacts, MatrixFacts

ARCHITECTURE = "sm_90a"
MOST_EXPERTS = 1024  # the route kernel counts each in a thread
STAGE_K = 64
COLUMNS = 256  # of a tile, in two halves
MOST_X_BYTES = 2**32 - 1  # of a pass: the kernels' offsets into x have 32 bits
LAST_PIECE_BYTES = 112  # from a row's first byte to the last of the 16-byte pieces that its offsets point to
SMEM_BYTES = 227 * 1024  # of a block that has a multiprocessor to itself
RESERVED_BYTES = 1024  # of every block
MOST_STAGES = 12
EPILOGUE_BYTES = 8 * 2560
QUEUE_BYTES = 4 * (32 + 16)


WEIGHT_COST = 24  # what a tile's weights cost, in tokens: copied, made into fragments
SETTLED_SHARE = 4096  # more rows of an expert take the same tile


@dataclass(frozen=True, slots=True, kw_only=True)
class TileShape:
    """How an expert's rows are cut: into as few tiles of about one size as hold at most `rows` each.

    Attributes:
        rows: the most of a tile.
        widths: of the wgmma instructions that the kernel has; a tile takes the smallest that holds it. The
            assembler overlaps the instructions of few widths in one kernel, and serializes those of more.
        blocks_per_sm: how many blocks share a multiprocessor.
        steps: steps of 16 inputs whose products are issued together.
    """

    rows: int
    widths: tuple[int, ...]
    blocks_per_sm: int = 1
    steps: int = 2

    @property
    def mask(self) -> int:
        """The widths as bits: bit i is width 8i."""
        return sum(1 << width // 8 for width in self.widths)

    def cost(self, share: int) -> int:
        """What an expert of about `share` rows costs, in tokens: its tiles' widths, and weights for each."""
        usual_most = share + math.isqrt(share)  # a standard deviation more
        tiles = -(-usual_most // self.rows)
        width = next(width for width in self.widths if width * tiles >= share)
        return tiles * (width + WEIGHT_COST)


TILE_SHAPES = (
    TileShape(rows=32, widths=(8, 16, 24, 32), blocks_per_sm=2, steps=1),
    TileShape(rows=48, widths=(32, 48), blocks_per_sm=2, steps=1),
    TileShape(rows=64, widths=(32, 48, 56, 64)),
    TileShape(rows=80, widths=(56, 64, 72, 80)),
    TileShape(rows=104, widths=(80, 88, 96, 104)),
    TileShape(rows=144, widths=(128, 144)),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmVariant:
    """One binary of `cuda/prefill_gemm.cu`: everything that is a constant in it."""

    fp16: bool
    bits: int
    group: int
    symmetric: bool
    second: bool
    gated: bool
    tile: TileShape

    @property
    def stages(self) -> int:
        """Stages of the ring: as many as shared memory holds."""
        blocks = self.tile.blocks_per_sm
        room = (SMEM_BYTES + RESERVED_BYTES) // blocks - RESERVED_BYTES
        return min(MOST_STAGES, (room - self._fixed_bytes) // self._stage_bytes)

    @property
    def smem_bytes(self) -> int:
        """Dynamic shared memory of a block: `Layout` in `cuda/prefill_ring.cuh`."""
        return self.stages * self._stage_bytes + self._fixed_bytes

    @property
    def constants(self) -> dict[str, int | bool]:
        """The constants by their names in the source."""
        return {
            "FP16": self.fp16,
            "BITS": self.bits,
            "GROUP": self.group,
            "SYMMETRIC": self.symmetric,
            "SECOND": self.second,
            "GATED": self.gated,
            "TOKEN_TILE": self.tile.rows,
            "WIDTHS": self.tile.mask,
            "STEPS": self.tile.steps,
            "STAGES": self.stages,
            "SMEM_BYTES": self.smem_bytes,
            "BLOCKS_PER_SM": self.tile.blocks_per_sm,
        }

    @property
    def label(self) -> str:
        """What people call it: `prefill 1 bf16 w4g128z tile 64`; z is asymmetric."""
        kind = "" if self.gated else " ungated"
        return (
            f"prefill {2 if self.second else 1} {'fp16' if self.fp16 else 'bf16'} "
            f"w{self.bits}g{self.group}{'' if self.symmetric else 'z'}{kind} tile {self.tile.rows}"
        )

    @property
    def _groups(self) -> int:
        """Groups of a stage."""
        return 0 if self.group == 0 else max(1, STAGE_K // self.group)

    @property
    def _stage_bytes(self) -> int:
        tokens = -(-self.tile.rows // 16) * 16 * STAGE_K * 2
        words = STAGE_K * COLUMNS * self.bits // 8
        scales = self._groups * COLUMNS * 2
        half_zeros = 0 if self.symmetric else self._groups * COLUMNS // 2 * self.bits // 8
        barriers = 16
        return tokens + words + scales + 2 * (-(-half_zeros // 128) * 128) + barriers

    @property
    def _fixed_bytes(self) -> int:
        rows = 4 * self.tile.rows * 8
        return EPILOGUE_BYTES + rows + QUEUE_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillVariant:
    """Both GEMMs of a layer, with one token tile."""

    first: GemmVariant
    second: GemmVariant

    @property
    def tile(self) -> TileShape:
        """The token tile of both."""
        return self.first.tile


def choose_variant(facts: LayerFacts, *, rows: int) -> PrefillVariant:
    """The variant for `rows` rows, by an expert's average share of them."""
    return variant(facts, tile=choose_tile(_share(facts, rows)))


def choose_tile(share: int) -> TileShape:
    """The tile for experts of about `share` rows: the cheapest, of equals the narrowest."""
    return min(TILE_SHAPES, key=lambda tile: tile.cost(share))


def variants(facts: LayerFacts, *, first: int = 1, last: int | None = None) -> tuple[PrefillVariant, ...]:
    """All that `choose_variant` chooses for `first` .. `last` rows, of any number where None."""
    least, most = _share(facts, first), None if last is None else _share(facts, last)
    return tuple(variant(facts, tile=tile) for tile in tiles_between(least, most))


def tiles_between(least: int, most: int | None) -> tuple[TileShape, ...]:
    """The tiles of experts of `least` .. `most` rows, or of any number from `least` on; by width."""
    shares = _tiles_of_shares()
    chosen = set(shares[min(least, len(shares)) - 1 : most])
    return tuple(tile for tile in TILE_SHAPES if tile in chosen)


@functools.cache
def _tiles_of_shares() -> tuple[TileShape, ...]:
    """The tile of 1, 2, ... rows, up to where it no longer changes.

    s rows cost at most 168 * (1 + (s + s**0.5) / 144) in the widest tile, and in any other at least
    s + 24 * (s + s**0.5) / 104, which is more from s = 3600 on.
    """
    return tuple(choose_tile(share) for share in range(1, SETTLED_SHARE + 1))


def variant(facts: LayerFacts, *, tile: TileShape) -> PrefillVariant:
    """The layer's variant with a token tile."""
    return PrefillVariant(
        first=_gemm(facts, facts.w13, second=False, tile=tile),
        second=_gemm(facts, facts.w2, second=True, tile=tile),
    )


def _share(facts: LayerFacts, rows: int) -> int:
    return -(-rows // facts.num_global_experts)


def _gemm(facts: LayerFacts, matrix: MatrixFacts, *, second: bool, tile: TileShape) -> GemmVariant:
    return GemmVariant(
        fp16=facts.scales_dtype == torch.float16,
        bits=matrix.bits,
        group=0 if matrix.num_groups == 1 else matrix.size_k // matrix.num_groups,
        symmetric=not matrix.zero_points,
        second=second,
        gated=facts.gated or second,  # nothing in GEMM 2 depends on it
        tile=tile,
    )


def buffers(facts: LayerFacts, *, rows: int) -> list[Need]:
    """What the path needs for `rows` rows; a plan has them for all paths (`cuda_moe.plan_workspace`).

    buffer          dtype    shape        holds
    counters        int32    [4]          token tiles; the next work item of each GEMM
    routed_rows     int32    [rows, 2]    slot and router weight (float32) of each row; by expert
    slot_is_here    int32    [rows]       1 where a slot reaches an expert of this rank
    token_tiles     int32    [tiles, 8]   `TokenTile` in `cuda/prefill_args.cuh`
    activations     x.dtype  [rows, Ip]
    w2_output       x.dtype  [rows, H]    by slot
    """
    tiles = min(rows, facts.num_experts + rows // TILE_SHAPES[0].rows)
    return [
        ("counters", torch.int32, (4,)),
        ("routed_rows", torch.int32, (rows, 2)),
        ("slot_is_here", torch.int32, (rows,)),
        ("token_tiles", torch.int32, (tiles, 8)),
        ("activations", facts.scales_dtype, (rows, facts.padded_intermediate_size)),
        ("w2_output", facts.scales_dtype, (rows, facts.hidden_size)),
    ]


def most_tokens(row_bytes: int) -> int:
    """Tokens of a pass over an x whose rows lie `row_bytes` apart."""
    return 1 + (MOST_X_BYTES - LAST_PIECE_BYTES) // max(1, row_bytes)


def column_tiles(facts: LayerFacts) -> tuple[int, int]:
    """Tiles of columns of GEMM 1, where a gate and its up share one, and of GEMM 2."""
    return -(-facts.w13.size_n // COLUMNS), -(-facts.hidden_size // COLUMNS)


def reason_against(facts: LayerFacts, arch: str) -> str | None:
    """Why the path does not run a layer on a device of an architecture, or None."""
    if arch != ARCHITECTURE:
        return f"the device is {arch}, and wgmma is {ARCHITECTURE}'s"
    if facts.w13.sort_order:
        return "w13 has an act-order, and tokens are copied 16 bytes at a time"
    if facts.num_experts > MOST_EXPERTS:
        return f"the layer has {facts.num_experts} experts, and the route kernel counts {MOST_EXPERTS}"
    return None
