"""The decode path's plan: the variants of `cuda/decode.cu`, which few rows run through, and its buffers.

One block per multiprocessor with rings of stages that run ahead. A stage is eight blocks of 64 columns times
256 / bits inputs: 16 KiB of words, and their scales and zero points. Sizes are those of
`cuda/decode_shape.cuh`.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from .problem import LayerFacts, MatrixFacts
from .variant import KernelVariant, form_of

MAX_SLOTS = 2048  # as in cuda/decode_route.cuh
MAX_EXPERTS = 1024  # their counts lie where tokens and activations come later
MAX_NUMBERS = 2**22 - 1
"""The most slots of all token tiles: blocks take ranges of them (`Ranges` in cuda/decode_work.cuh), whose
borders are numbers of 32 bits, 10 of them behind the point."""

TOKEN_TILES = {8: 4, 16: 10, 32: 32}
"""Token tile: the most rows an expert gets on average. Weights are read again for each tile of an expert."""

STAGE_BLOCKS, STAGE_WORD_BYTES = 8, 16384
STAGE_COLUMNS = 64 * STAGE_BLOCKS
SMEM_BYTES = {
    80: 163 * 1024,
    86: 99 * 1024,
    87: 163 * 1024,
    88: 163 * 1024,
    89: 99 * 1024,
    90: 227 * 1024,
    100: 227 * 1024,
    103: 227 * 1024,
    110: 227 * 1024,
    120: 99 * 1024,
    121: 99 * 1024,
}
"""What a block may have, by compute capability: CUDA C++ Programming Guide, "Technical Specifications per
Compute Capability". Others are taken to have the least of these."""

SLOT_STEPS = (32, 256, MAX_SLOTS)  # shared memory is reserved for calls of up to so many slots


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeVariant(KernelVariant):
    """A binary of the decode path.

    Attributes:
        hidden, intermediate: H and the padded I.
        teams: of eight warps and a producer; each has a ring.
        ring_stages: of a team.
        activation_k: inputs of w2 whose activations fit the shared memory.
    """

    source: ClassVar[str] = "decode.cu"
    kernel: ClassVar[str] = "decode"
    blocks_per_sm: ClassVar[int] = 1
    waits_for_kernel_before: ClassVar[bool] = True

    hidden: int
    intermediate: int
    teams: int
    ring_stages: int
    activation_k: int

    @property
    def label(self) -> str:
        """As in KernelVariant, and the sizes: `decode bf16 w4g32-w4g32 tile 8 of 7168 x 256`."""
        form = KernelVariant.label.fget(self)  # type: ignore[attr-defined]
        return f"{form} of {self.hidden} x {self.intermediate}"

    @property
    def threads(self) -> int:
        """Of a block."""
        return (STAGE_BLOCKS + 1) * 32 * self.teams

    @property
    def stage_bytes(self) -> int:
        """Words, scales and zero points of a stage, of the matrix that has more."""
        return max(
            _stage_bytes(self.w13_bits, self.w13_group, self.w13_symmetric),
            _stage_bytes(self.w2_bits, self.w2_group, self.w2_symmetric),
        )

    def smem_bytes(self, *, num_experts: int, slots: int) -> int:
        """Rings, two chunks of tokens, activations (or the other teams' sums), lists of the route."""
        chunk_k = 8 * 32 * STAGE_BLOCKS * self.teams // self.token_tile
        tokens = 2 * self.token_tile * (chunk_k + 8) * 2
        activations = self.token_tile * (self.activation_k + 8) * 2
        exchange = (self.teams - 1) * STAGE_BLOCKS * 2048
        rings = self.teams * self.ring_stages * self.stage_bytes
        reserved = next(step for step in SLOT_STEPS if slots <= step)
        tiles = min(reserved, num_experts + reserved // self.token_tile)
        return rings + tokens + max(activations, exchange) + 8 * reserved + 6 * tiles

    def fewest_parts(self) -> int:
        """Parts that w2's K is cut into at least, since the activations of each must fit."""
        slots = self.intermediate * self.w2_bits // 256
        most = self.activation_k * self.w2_bits // 256
        return -(-slots // most)


def max_rows(facts: LayerFacts) -> int:
    """The most rows that the decode path runs of a layer; 0 where it runs none.

    No more than make `MAX_NUMBERS` where each is a token tile by itself.
    """
    if facts.num_experts > MAX_EXPERTS:
        return 0
    of_a_tile = max(tile_slots(facts.w13), tile_slots(facts.w2))
    return min(MAX_SLOTS, max(TOKEN_TILES.values()) * facts.num_global_experts, MAX_NUMBERS // of_a_tile)


def tile_slots(matrix: MatrixFacts) -> int:
    """Slots of a matrix, which a token tile is multiplied with: 512 columns times 256 / bits inputs each."""
    return -(-matrix.size_n // STAGE_COLUMNS) * (matrix.size_k * matrix.bits // 256)


def choose_variant(facts: LayerFacts, *, rows: int, arch: str) -> DecodeVariant | None:
    """The variant for `rows` rows on an architecture, or None where another path runs them."""
    if rows > max_rows(facts):
        return None
    return variant(facts, token_tile=token_tile(facts, rows=rows), arch=arch)


def token_tile(facts: LayerFacts, *, rows: int) -> int:
    """The token tile for `rows` rows, by an expert's average share of them."""
    return next(tile for tile, most in TOKEN_TILES.items() if rows <= most * facts.num_global_experts)


def variants(facts: LayerFacts, arch: str) -> tuple[DecodeVariant, ...]:
    """All that `choose_variant` can choose for a layer on an architecture."""
    most = max_rows(facts)
    tiles = [tile for tile in TOKEN_TILES if tile <= token_tile(facts, rows=most)] if most else []
    return tuple(variant(facts, token_tile=tile, arch=arch) for tile in tiles)


def variant(facts: LayerFacts, *, token_tile: int, arch: str) -> DecodeVariant:
    """The layer's variant with a token tile: as many teams and stages as the architecture has room for."""
    return DecodeVariant(
        **form_of(facts),
        token_tile=token_tile,
        hidden=facts.hidden_size,
        intermediate=facts.padded_intermediate_size,
        **resources(token_tile, arch),
    )


def resources(token_tile: int, arch: str) -> dict[str, Any]:
    """The fields of a variant that an architecture decides."""
    smem = SMEM_BYTES.get(int(arch.removeprefix("sm_").rstrip("af")), min(SMEM_BYTES.values()))
    small = smem < 128 * 1024
    teams = 1 if small or token_tile == 32 else 2  # two teams have 96 registers, too few for a tile of 32
    stages = 2 if small else 4 if smem < 200 * 1024 else 6
    return {
        "teams": teams,
        "ring_stages": stages // teams,
        "activation_k": (8192 if small else 16384) // token_tile,
    }


def first_sums_floats(facts: LayerFacts, *, rows: int, blocks: int) -> int:
    """float32 of GEMM 1's sums: each (tile, strip) of 512 columns has at most blocks / units + 2 pieces."""
    rows = min(rows, max_rows(facts))
    return max(TOKEN_TILES) * 512 * blocks + 2 * rows * facts.w13.size_n if rows else 0


def slot_sums_bytes(facts: LayerFacts, *, rows: int, arch: str) -> int:
    """Bytes of GEMM 2's sums in the fewest parts that any tile needs on an architecture."""
    rows = min(rows, max_rows(facts))
    parts = max((v.fewest_parts() for v in variants(facts, arch)), default=0)
    return parts * rows * facts.hidden_size * 4


def _stage_bytes(bits: int, group: int, symmetric: bool) -> int:
    inputs = 256 // bits
    scales = 0 if group == 0 else max(1, inputs // group)
    zeros = 0 if symmetric else max(1, scales)
    return STAGE_WORD_BYTES + STAGE_BLOCKS * (128 * scales + 8 * bits * zeros)
