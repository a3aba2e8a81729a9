"""Our op, and our op with what it does away with: a workspace allocated and zeroed in every call."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from layer_tensors import Routing

from marlin_moe import MarlinMoELayer, fused_marlin_moe
from marlin_moe.kernels.plan.buffers import WorkspacePlan
from marlin_moe.kernels.plan.workspaces import plan_workspace
from marlin_moe.kernels.scratch import Lease, Scratch, StreamKey
from marlin_moe.kernels.workspace import Workspace


class Ours:
    """`fused_marlin_moe` with the persistent workspace that layers share."""

    def __init__(self, layers: Sequence[MarlinMoELayer]) -> None:
        self.layers = layers

    def __call__(self, index: int, x: torch.Tensor, routing: Routing) -> torch.Tensor:
        """The output of layer `index`."""
        return fused_marlin_moe(x, self.layers[index], routing.weights, routing.ids, backend="cuda")

    def workspace_bytes(self, rows: int) -> int:
        """What the plan takes for this many rows."""
        return _plan_of(self.layers[0], rows).nbytes


class OursPerCall(Ours):
    """The same kernels, launched on a fresh `torch.zeros` of the bytes planned for the call's rows.

    Per call that adds one allocation from torch's caching allocator and one memset of the whole workspace,
    activations included (in a graph: a node of it); the memset also takes as many bytes of the cache. Nothing
    else differs: the kernels themselves ask for no zeros. An engine that zeroes less pays less;
    `workspace_bytes` says how much this zeroes.
    """

    def __init__(self, layers: Sequence[MarlinMoELayer]) -> None:
        super().__init__([replace(layer, workspace=ZeroedWorkspace.attach(layer)) for layer in layers])

    def __call__(self, index: int, x: torch.Tensor, routing: Routing) -> torch.Tensor:
        """The output of layer `index`."""
        workspace = self.layers[index].workspace
        assert isinstance(workspace, ZeroedWorkspace)
        workspace.rows = routing.ids.numel()
        return super().__call__(index, x, routing)


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


def _plan_of(layer: MarlinMoELayer, rows: int) -> WorkspacePlan:
    assert layer.workspace is not None
    return plan_workspace("cuda", layer.workspace.facts, layer.device, rows=rows)
