"""What is measured: the shapes of five models' MoE layers, the formats of their weights, and the floor.

Letters: M tokens, T top-k, E experts of this rank, H hidden size, I intermediate size of this rank.
"""

from dataclasses import dataclass

ACTIVATION_BYTES = 2  # bf16 tokens and scales


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerShape:
    """One rank's MoE layer of a model."""

    name: str
    num_experts: int
    top_k: int
    hidden_size: int
    intermediate_size: int
    group_size: int

    @property
    def matrices(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """(K, N) of w13 and w2."""
        return (
            (self.hidden_size, 2 * self.intermediate_size),
            (self.intermediate_size, self.hidden_size),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightFormat:
    """How the weights are stored; `act_order` is GPTQ's, for w13 (w2's is folded into w13's columns)."""

    name: str
    bits: int
    symmetric: bool = True
    act_order: bool = False


SHAPES = {
    name: LayerShape(
        name=name,
        num_experts=num_experts,
        top_k=top_k,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        group_size=group_size,
    )
    for name, num_experts, top_k, hidden_size, intermediate_size, group_size in (
        ("kimi-k2.5-tp8", 384, 8, 7168, 256, 32),
        ("kimi-k2.5-ep8", 48, 1, 7168, 2048, 32),  # a token reaches one of its eight experts here, or so
        ("qwen3-30b-a3b", 128, 8, 2048, 768, 128),
        ("deepseek-v3-tp8", 256, 8, 7168, 256, 128),
        ("mixtral-8x7b", 8, 2, 4096, 14336, 128),
    )
}
FORMATS = {
    entry.name: entry
    for entry in (
        WeightFormat(name="int4", bits=4),
        WeightFormat(name="int8", bits=8),
        WeightFormat(name="int4-asym", bits=4, symmetric=False),
        WeightFormat(name="int4-act-order", bits=4, act_order=True),
    )
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A shape and format, and the numbers of tokens at which they are measured."""

    shape: LayerShape
    form: WeightFormat
    tokens: tuple[int, ...]


DECODE_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128)
ALL_TOKENS = (*DECODE_TOKENS, 256, 512, 1024, 2048, 4096, 8192)
FULL_SWEEP = (
    *(Case(shape=shape, form=FORMATS["int4"], tokens=ALL_TOKENS) for shape in SHAPES.values()),
    *(
        Case(shape=SHAPES[shape], form=form, tokens=(1, 8, 32, 128))
        for shape in ("kimi-k2.5-tp8", "qwen3-30b-a3b")
        for name, form in FORMATS.items()
        if name != "int4"
    ),
)
"""What the published figures are made of: symmetric int4 everywhere, the other formats at two shapes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ceilings:
    """What the device reaches with nothing else to do, as measured."""

    copy_bytes_per_s: float
    read_bytes_per_s: float
    matmul_flops_per_s: float

    @property
    def bytes_per_s(self) -> float:
        """The better of copying and reading."""
        return max(self.copy_bytes_per_s, self.read_bytes_per_s)


def expert_bytes(shape: LayerShape, form: WeightFormat) -> int:
    """Bytes of one expert: words, scales, zero points, sort order."""
    total = 0
    for size_k, size_n in shape.matrices:
        groups = size_k // shape.group_size
        total += size_k * size_n * form.bits // 8 + groups * size_n * ACTIVATION_BYTES
        total += 0 if form.symmetric else groups * size_n * form.bits // 8
    return total + (4 * shape.hidden_size if form.act_order else 0)


def layer_flops(shape: LayerShape, *, tokens: int) -> int:
    """Operations of both GEMMs, a multiply-add being two."""
    return sum(2 * size_k * size_n * tokens * shape.top_k for size_k, size_n in shape.matrices)


def floor_us(
    shape: LayerShape, form: WeightFormat, *, tokens: int, active_experts: int, ceilings: Ceilings
) -> float:
    """No layer is faster: bytes of experts and tokens over bandwidth, or operations over matmul rate."""
    moved = active_experts * expert_bytes(shape, form) + 2 * tokens * shape.hidden_size * ACTIVATION_BYTES
    return 1e6 * max(
        moved / ceilings.bytes_per_s, layer_flops(shape, tokens=tokens) / ceilings.matmul_flops_per_s
    )


def layer_count(shape: LayerShape, form: WeightFormat, *, budget_bytes: int = 20 << 30) -> int:
    """Different layers in one graph, so that every layer finds its weights in memory and not in the cache."""
    return max(2, min(8, budget_bytes // (shape.num_experts * expert_bytes(shape, form))))
