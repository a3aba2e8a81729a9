"""Our op, and our op with what it does away with: a workspace allocated and zeroed in every call."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from layer_tensors import Routing

from marlin_moe import MarlinMoELayer, fused_marlin_moe
from marlin_moe.bench.zeroed_workspace import ZeroedWorkspace
from marlin_moe.kernels.plan.buffers import WorkspacePlan
from marlin_moe.kernels.plan.workspaces import plan_workspace


class Ours:
    """`fused_marlin_moe` with the persistent workspace that layers share, on a backend."""

    def __init__(self, layers: Sequence[MarlinMoELayer], *, backend: str = "cuda") -> None:
        self.layers, self.backend = layers, backend

    def __call__(self, index: int, x: torch.Tensor, routing: Routing) -> torch.Tensor:
        """The output of layer `index`."""
        return fused_marlin_moe(x, self.layers[index], routing.weights, routing.ids, backend=self.backend)

    def workspace_bytes(self, rows: int) -> int:
        """What the plan takes for this many rows."""
        return _plan_of(self.layers[0], rows, self.backend).nbytes

    def layer_workspace_bytes(self) -> int:
        """What the layers hold since their first call, together: it is shared."""
        assert self.layers[0].workspace is not None
        return self.layers[0].workspace.nbytes


class OursPerCall(Ours):
    """The same kernels, launched on a fresh `torch.zeros` of the bytes planned for the call's rows.

    Per call that adds one allocation from torch's caching allocator and one memset of the whole workspace,
    activations included (in a graph: a node of it); the memset also takes as many bytes of the cache. Nothing
    else differs: the kernels themselves ask for no zeros. An engine that zeroes less pays less;
    `workspace_bytes` says how much this zeroes.
    """

    def __init__(self, layers: Sequence[MarlinMoELayer], *, backend: str = "cuda") -> None:
        zeroed = [replace(layer, workspace=ZeroedWorkspace.attach(layer)) for layer in layers]
        super().__init__(zeroed, backend=backend)

    def __call__(self, index: int, x: torch.Tensor, routing: Routing) -> torch.Tensor:
        """The output of layer `index`."""
        workspace = self.layers[index].workspace
        assert isinstance(workspace, ZeroedWorkspace)
        workspace.rows = routing.ids.numel()
        return super().__call__(index, x, routing)


def _plan_of(layer: MarlinMoELayer, rows: int, backend: str) -> WorkspacePlan:
    assert layer.workspace is not None
    return plan_workspace(backend, layer.workspace.facts, layer.device, rows=rows)
