"""The reference backend's plan: its buffers, and how many tokens one pass takes."""

from dataclasses import dataclass

import torch

from ..errors import WorkspaceError
from .buffers import WorkspacePlan, planned_rows
from .problem import LayerFacts, MoEProblem


def plan_workspace(facts: LayerFacts, *, rows: int) -> WorkspacePlan:
    """The buffers of a layer for `rows` rows (at most 2**31 - 1 are planned).

    buffer            dtype    shape        holds
    expert_offsets    int32    [E + 1]      expert e has rows [e] .. [e + 1] - 1
    sorted_slots      int32    [rows]       token * T + slot of each row, sorted by expert
    row_of_slot       int32    [rows]       the inverse, -1 where a slot reaches no expert of this rank
    w13_output        float32  [rows, N]    x times w13: N = 2 * Ip, or Ip if ungated
    activations       float32  [rows, Ip]
    w2_output         float32  [rows, H]
    """
    rows = planned_rows(rows)
    return WorkspacePlan.lay_out(
        f"reference workspace of {facts}",
        rows=rows,
        buffers=(
            ("expert_offsets", torch.int32, (facts.num_experts + 1,)),
            ("sorted_slots", torch.int32, (rows,)),
            ("row_of_slot", torch.int32, (rows,)),
            ("w13_output", torch.float32, (rows, facts.w13.size_n)),
            ("activations", torch.float32, (rows, facts.padded_intermediate_size)),
            ("w2_output", torch.float32, (rows, facts.hidden_size)),
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class MoEPlan:
    """How a call runs: `num_chunks` passes over at most `chunk_tokens` tokens, in order."""

    problem: MoEProblem
    chunk_tokens: int

    @property
    def num_chunks(self) -> int:
        """Passes."""
        return -(-self.problem.tokens // self.chunk_tokens)

    def chunks(self) -> list[slice]:
        """The tokens of each pass."""
        starts = range(0, self.problem.tokens, self.chunk_tokens)
        return [slice(start, min(start + self.chunk_tokens, self.problem.tokens)) for start in starts]


def plan_moe(problem: MoEProblem, workspace: WorkspacePlan) -> MoEPlan:
    """The plan of a call in a workspace of `workspace.rows` rows.

    Raises:
        WorkspaceError: the workspace is smaller than one token's slots.
    """
    chunk_tokens = workspace.rows // problem.top_k
    if chunk_tokens == 0:
        raise too_few_rows(problem.top_k, workspace.rows)
    return MoEPlan(problem=problem, chunk_tokens=chunk_tokens)


def too_few_rows(top_k: int, rows: int) -> WorkspaceError:
    """The error of a workspace that does not hold one token's slots."""
    return WorkspaceError(
        f"workspace: expected top_k = {top_k} rows or more, as a token's slots run together, "
        f"got {rows}, as planned at load or by the first call, and it never grows. "
        f"Load the layer with top_k={top_k}, or with larger max_tokens."
    )
