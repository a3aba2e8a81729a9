"""What a TP x EP split makes of a layer, from its facts alone: `SplitReport`, with the bytes of a rank."""

from dataclasses import dataclass

from ..kernels.layer import Shard
from ..kernels.layout import TILE_N
from .errors import ShardError
from .stages.shard import fits, sliced_group_size
from .states import ExpertFacts

MAX_TP = 64
"""TP sizes are tried up to here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitReport:
    """One rank of `tp` x `ep`.

    Attributes:
        tp, ep: ranks that share the intermediate size, and the experts.
        problem: why the layer does not split so, with the sizes that work; None where it does, and then:
        num_experts: experts of the rank that has most.
        intermediate_size: I of a rank, unpadded.
        padded_intermediate_size: the same as it lies in memory, a multiple of 64.
        w2_group_size: inputs per scale of w2 on a rank; None is one scale per column.
        regrouped: a slice cuts groups of the source, so scales are repeated for smaller ones.
        rank_bytes: of the weights of the rank that has most.
        tp_sizes: all that work, up to 64.
        max_ep: every EP size up to this works.
    """

    tp: int
    ep: int
    problem: str | None
    num_experts: int | None = None
    intermediate_size: int | None = None
    padded_intermediate_size: int | None = None
    w2_group_size: int | None = None
    regrouped: bool = False
    rank_bytes: int | None = None
    tp_sizes: tuple[int, ...]
    max_ep: int

    @property
    def fits(self) -> bool:
        """Whether the layer splits so."""
        return self.problem is None


def split_report(facts: ExpertFacts, *, tp: int, ep: int) -> SplitReport:
    """What each of `tp` x `ep` ranks would hold of the layer of these (source) facts.

    Raises:
        LayerError, TypeError: a size below 1, or no int.
    """
    shard, _ = Shard(0, tp), Shard(0, ep)
    tp_sizes = tuple(size for size in range(1, MAX_TP + 1) if fits(facts, size))
    problem = None
    try:
        group_size = sliced_group_size(facts, shard)
    except ShardError as error:
        problem = str(error)
    if problem is None and ep > facts.num_experts:
        problem = (
            f"{facts.module}: expected at least one expert on every EP rank, got {facts.num_experts} experts "
            f"for ep={ep}. EP sizes up to {facts.num_experts} work."
        )
    if problem is not None:
        return SplitReport(tp=tp, ep=ep, problem=problem, tp_sizes=tp_sizes, max_ep=facts.num_experts)
    intermediate, num_experts = facts.intermediate_size // tp, -(-facts.num_experts // ep)
    if group_size is not None and group_size >= padded(intermediate):
        group_size = None  # one group is one scale per column, as the layer says it
    one_expert = expert_bytes(facts, intermediate_size=intermediate, w2_group_size=group_size)
    return SplitReport(
        tp=tp,
        ep=ep,
        problem=None,
        num_experts=num_experts,
        intermediate_size=intermediate,
        padded_intermediate_size=padded(intermediate),
        w2_group_size=group_size,
        regrouped=group_size not in (None, facts.w2.group_size),
        rank_bytes=num_experts * one_expert,
        tp_sizes=tp_sizes,
        max_ep=facts.num_experts,
    )


def padded(intermediate_size: int) -> int:
    """Ip: the next multiple of 64."""
    return -(-intermediate_size // TILE_N) * TILE_N


def expert_bytes(facts: ExpertFacts, *, intermediate_size: int, w2_group_size: int | None) -> int:
    """Bytes of one expert in the Marlin layout, with its I padded."""
    h, ip, scale = facts.hidden_size, padded(intermediate_size), facts.scales_dtype.itemsize
    total = 0
    for matrix, k, n, group_size in (
        (facts.w13, h, facts.halves * ip, facts.w13.group_size),
        (facts.w2, ip, h, w2_group_size),
    ):
        groups = 1 if group_size is None else k // group_size
        total += k * n * matrix.bits // 8 + groups * n * scale
        total += 0 if matrix.symmetric else groups * n * matrix.bits // 8
        total += n * scale if facts.biased else 0
    order_words = (h if facts.w13.act_order else 0) + (intermediate_size if facts.w2.act_order else 0)
    return total + 4 * order_words
