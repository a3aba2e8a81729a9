"""The Triton backend: a GPU of any maker that Triton compiles for, five plain launches per pass.

    topk_ids -- count_rows, place_rows --> rows by expert, token tiles
    x -- first_gemm --> activations -- second_gemm --> a row per slot -- add_slots --> out

Every sum has one order and nothing is added atomically, so the same call gives the same bits. Kernels are
compiled by the first call that needs them. With TRITON_INTERPRET=1 they run on a CPU, to be looked at.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch

from ..arguments import MoEArguments
from ..capture import calls_allowed_in_capture
from ..device import reason_against_triton, triton_is_interpreted
from ..errors import BackendError, MarlinMoEError
from ..matrix import MarlinMatrix
from ..plan import triton_moe as planner
from ..plan.problem import LayerFacts, MoEProblem
from ..plan.reference import plan_moe
from ..plan.triton_moe import Tiles
from ..scratch import Lease
from .cuda_arguments import activation_numbers, as_it_lies

ROUTE_BLOCK = 1024
"""Slots that a program of the routing kernels looks at in one step."""
SUM_BLOCK = 512
"""Columns of a program of the sum."""


def reason_against(problem: MoEProblem) -> str | None:
    """Why this backend cannot run a problem, or None."""
    reason = planner.reason_against(problem, interpreted=triton_is_interpreted())
    return reason_against_triton() if reason is None else reason


def run(arguments: MoEArguments, out: torch.Tensor, lease: Lease) -> None:
    """Write the layer's output for x [M, H] into out [M, H] on the current stream, in chunks of the lease."""
    facts = arguments.workspace().facts
    plan = plan_moe(arguments.problem(), lease.plan)
    x, weights, ids = (
        arguments.x.resolve_neg(),
        as_it_lies(arguments.topk_weights),
        as_it_lies(arguments.topk_ids),
    )
    expert_map = None if arguments.expert_map is None else as_it_lies(arguments.expert_map)
    tiles = planner.choose_tiles(facts, rows=min(plan.chunk_tokens, len(x)) * ids.shape[1])
    with _launching(x.device):
        for part in plan.chunks():
            Pass(
                arguments=arguments,
                facts=facts,
                tiles=tiles,
                buffers=lease.buffers,
                x=x[part],
                weights=weights[part],
                ids=ids[part],
                expert_map=expert_map,
                out=out[part],
            ).run()


@contextmanager
def _launching(device: torch.device) -> Iterator[None]:
    """Launches go to the device; one that loads its kernel first may do so while the stream is captured.

    Raises:
        BackendError: Triton does not compile or launch a kernel.
    """
    try:
        with ExitStack() as stack:
            if device.type == "cuda":  # else the interpreter
                stack.enter_context(torch.cuda.device(device))
                stack.enter_context(calls_allowed_in_capture())
            yield
    except MarlinMoEError:
        raise
    except Exception as error:  # Triton's own types are many and change
        raise BackendError(
            f"backend triton: expected Triton to compile and launch its kernels on {device}, got "
            f"{type(error).__name__}: {error}. Choose another backend=."
        ) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """The launches over a chunk of tokens: x [m, H], weights and ids [m, T], out [m, H]."""

    arguments: MoEArguments
    facts: LayerFacts
    tiles: Tiles
    buffers: dict[str, torch.Tensor]
    x: torch.Tensor
    weights: torch.Tensor
    ids: torch.Tensor
    expert_map: torch.Tensor | None
    out: torch.Tensor

    def run(self) -> None:
        """All of them, in order."""
        self.route()
        self.first_gemm()
        self.second_gemm()
        self.add_slots()

    @property
    def experts(self) -> dict[str, int]:
        """What maps ids to experts."""
        return {"NUM_GLOBAL": self.facts.num_global_experts, "NUM_EXPERTS": self.facts.num_experts}

    @property
    def tile_bound(self) -> int:
        """Token tiles that programs are launched for; those behind the last one end at once."""
        return planner.most_tiles(self.facts, rows=self.ids.numel(), tokens=self.tiles.tokens)

    @property
    def table(self) -> tuple[torch.Tensor, ...]:
        """The rows and tiles, as both GEMMs take them."""
        names = ("sorted_slots", "tile_count", "tile_expert", "tile_row", "tile_rows")
        return tuple(self.buffers[name] for name in names)

    def route(self) -> None:
        """Rows by expert, and the token tiles."""
        from ..triton import route

        grid, slots, rows = (self.facts.num_experts,), self.ids.numel(), self.buffers["expert_rows"]
        route.count_rows[grid](self.ids, self.expert_map, rows, slots, **self.experts, BLOCK=ROUTE_BLOCK)
        route.place_rows[grid](
            self.ids,
            self.expert_map,
            rows,
            *self.table,
            slots,
            **self.experts,
            TOKEN_TILE=self.tiles.tokens,
            BLOCK=ROUTE_BLOCK,
            BLOCK_E=_power_of_two(self.facts.num_experts),
        )

    def first_gemm(self) -> None:
        """x times w13, and the activation."""
        from ..triton import gemm

        matrix, width = self.arguments.layer.w13, self.facts.padded_intermediate_size
        gemm.first_gemm[self._grid(width)](
            self.x,
            *self.x.stride(),
            self.weights,
            matrix.qweight,
            matrix.scales,
            matrix.zero_points,
            matrix.sort_order,
            matrix.bias,
            *self.table,
            self.buffers["activations"],
            self.tile_bound,
            *activation_numbers(self.arguments.activation),
            GATED=self.facts.gated,
            KIND=self.arguments.activation.kind,
            TOP_K=self.ids.shape[1],
            **self._shape(matrix, width),
        )

    def second_gemm(self) -> None:
        """The activations times w2, and the router weights."""
        from ..triton import gemm

        matrix, width = self.arguments.layer.w2, self.facts.hidden_size
        gemm.second_gemm[self._grid(width)](
            self.buffers["activations"],
            self.weights,
            matrix.qweight,
            matrix.scales,
            matrix.zero_points,
            matrix.bias,
            *self.table,
            self._slots(),
            self.tile_bound,
            **self._shape(matrix, width),
        )

    def add_slots(self) -> None:
        """The sum over slots."""
        from ..triton import reduce

        tokens, size = self.out.shape
        reduce.add_slots[(tokens, -(-size // SUM_BLOCK))](
            self._slots(),
            self.ids,
            self.expert_map,
            self.out,
            self.out.stride(0),
            float(self.arguments.routed_scaling_factor),
            TOP_K=self.ids.shape[1],
            SIZE_N=size,
            **self.experts,
            BLOCK=SUM_BLOCK,
        )

    def _slots(self) -> torch.Tensor:
        """A row for each slot, one behind the other from the start of the buffer."""
        dtype = planner.slots_dtype(self.facts, rows=self.ids.numel())
        return self.buffers["w2_output"].view(-1).view(dtype)

    def _grid(self, width: int) -> tuple[int]:
        return (self.tile_bound * (width // self.tiles.columns_of(width)),)

    def _shape(self, matrix: MarlinMatrix, width: int) -> dict[str, int | bool]:
        """What is constant in a GEMM over a matrix."""
        return {
            "SIZE_K": matrix.size_k,
            "SIZE_N": matrix.size_n,
            "BITS": matrix.format.bits,
            "GROUP": matrix.size_k // matrix.num_groups,
            "WEIGHT_ON_INPUT": self.arguments.apply_router_weight_on_input,
            "TOKEN_TILE": self.tiles.tokens,
            "BLOCK_N": self.tiles.columns_of(width),
            "BLOCK_K": self.tiles.depth,
            "num_warps": self.tiles.num_warps(width),
            "num_stages": self.tiles.num_stages,
        }


def _power_of_two(count: int) -> int:
    """The smallest power of two that holds `count`."""
    return 1 << (count - 1).bit_length()
