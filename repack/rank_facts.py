"""A layer's facts in the checkpoint -> what the op plans a rank's layer by: `rank_facts`. Reads no tensor."""

from collections.abc import Iterator

import torch

from ..kernels.layer import Shard
from ..kernels.plan import cuda_moe, reference, triton_moe
from ..kernels.plan.problem import LayerFacts
from ..kernels.plan.problem import MatrixFacts as PlannedMatrix
from .advice import padded
from .errors import ShardError
from .stages.shard import sliced_group_size
from .states import ExpertFacts, MatrixFacts

CUDA_DTYPES = (torch.bfloat16, torch.float16)
"""Of scales that the backends of GPUs compute with, CUDA's and Triton's."""

PLANNED_SMS, PLANNED_ARCH = 132, "sm_90a"
"""The device that scratch is planned for, an H100 or H200; others differ a little."""


def rank_facts(facts: ExpertFacts, *, tp: Shard, ep: Shard, dtype: torch.dtype | None = None) -> LayerFacts:
    """The facts of the layer that `load_layers` makes for this rank, with scales of `dtype`.

    Raises:
        ShardError: the layer does not split so; it names the sizes that work.
    """
    start, stop = ep.bounds(facts.num_experts)
    if start == stop or ep.size > facts.num_experts:
        raise ShardError(
            f"{facts.module}: expected at least one expert on every EP rank, got {facts.num_experts} experts "
            f"for ep={ep.size}. EP sizes up to {facts.num_experts} work."
        )
    w2_group_size = sliced_group_size(facts, tp)
    hidden, inner = facts.hidden_size, padded(facts.intermediate_size // tp.size)
    return LayerFacts(
        num_experts=stop - start,
        num_global_experts=facts.num_experts,
        gated=facts.gated,
        w13=_matrix(facts.w13, hidden, facts.halves * inner, facts.w13.group_size, biased=facts.biased),
        w2=_matrix(facts.w2, inner, hidden, w2_group_size, biased=facts.biased, ordered=False),
        scales_dtype=facts.scales_dtype if dtype is None else dtype,
    )


def all_ranks(facts: ExpertFacts, *, tp: int, ep: int, dtype: torch.dtype | None = None) -> list[LayerFacts]:
    """What the ranks of a split hold, each kind once; raises as `rank_facts`."""

    def ranks() -> Iterator[LayerFacts]:
        for tp_rank in range(tp):
            for ep_rank in range(ep):
                yield rank_facts(facts, tp=Shard(tp_rank, tp), ep=Shard(ep_rank, ep), dtype=dtype)

    return list(dict.fromkeys(ranks()))


def workspace_bytes(facts: ExpertFacts, *, tp: int, ep: int, rows: int) -> dict[str, int]:
    """Backend -> bytes of scratch that the layer needs on the rank that needs most, for `rows` rows.

    Those of GPUs are left out where they do not compute in the dtype of the scales.
    """
    ranks = all_ranks(facts, tp=tp, ep=ep)
    planned = {"reference": max(reference.plan_workspace(rank, rows=rows).nbytes for rank in ranks)}
    if facts.scales_dtype not in CUDA_DTYPES:
        return planned
    return {
        "cuda": max(cuda_bytes(rank, rows=rows) for rank in ranks),
        "triton": max(triton_moe.plan_workspace(rank, rows=rows).nbytes for rank in ranks),
    } | planned


def cuda_bytes(facts: LayerFacts, *, rows: int) -> int:
    """Bytes of the CUDA backend's scratch for `rows` rows, on an H100 or H200."""
    blocks = cuda_moe.BLOCKS_PER_SM * PLANNED_SMS
    return cuda_moe.plan_workspace(facts, rows=rows, blocks=blocks, arch=PLANNED_ARCH).nbytes


def _matrix(
    matrix: MatrixFacts,
    size_k: int,
    size_n: int,
    group_size: int | None,
    *,
    biased: bool,
    ordered: bool = True,
) -> PlannedMatrix:
    """`ordered` is whether the matrix keeps an order of its own: w2's is folded into w13's columns."""
    return PlannedMatrix(
        size_k=size_k,
        size_n=size_n,
        bits=matrix.bits,
        num_groups=1 if group_size is None else size_k // group_size,
        zero_points=not matrix.symmetric,
        sort_order=ordered and matrix.act_order,
        bias=biased,
    )
