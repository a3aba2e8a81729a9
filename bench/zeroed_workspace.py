"""What a persistent workspace does away with: `ZeroedWorkspace`, new zeros in every call."""

import torch

from ..kernels.plan.buffers import WorkspacePlan
from ..kernels.plan.workspaces import plan_workspace
from ..kernels.scratch import Lease, Scratch, StreamKey
from ..kernels.workspace import Workspace


class ZeroedWorkspace(Workspace):
    """Hands out new zeros for `rows` rows at every call, inside and outside of captures."""

    __slots__ = ("plans", "rows")

    def __init__(self, *arguments: object, **options: object) -> None:
        super().__init__(*arguments, **options)  # type: ignore[arg-type]
        self.plans: dict[tuple[str, int], WorkspacePlan] = {}
        self.rows = 0

    def bound(self, backend: str, *, top_k: int) -> Lease:
        """New zeros."""
        return self.captured(backend, self.rows)

    def captured(self, backend: str, rows: int) -> Lease:
        """New zeros; from the graph's pool inside a capture."""
        plan = self.plans.get((backend, rows))
        if plan is None:
            plan = self.plans[backend, rows] = plan_workspace(backend, self.facts, self.device, rows=rows)
        zeros = torch.zeros(plan.nbytes, dtype=torch.uint8, device=self.device)
        start = zeros.data_ptr()
        return Lease(
            scratch=Scratch(StreamKey.current(self.device), zeros),
            plan=plan,
            buffers=Views(plan, zeros),
            addresses={buffer.name: start + buffer.offset_bytes for buffer in plan.buffers},
        )


class Views(dict[str, torch.Tensor]):
    """A plan's buffers in a scratch, each made when it is asked for: kernels that go by address need none."""

    def __init__(self, plan: WorkspacePlan, scratch: torch.Tensor) -> None:
        super().__init__()
        self.plan, self.scratch = plan, scratch

    def __missing__(self, name: str) -> torch.Tensor:
        view = next(buffer.view(self.scratch) for buffer in self.plan.buffers if buffer.name == name)
        self[name] = view
        return view
