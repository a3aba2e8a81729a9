"""The reference backend: any device, any mix of dtypes, float32 throughout. It defines what is correct.

    x [M, H] -- rows by expert --> w13_output --> activations --> w2_output -- sum over slots --> out [M, H]

Experts come in ascending order and slots are summed in ascending order, so the same call gives the same bits.
"""

from dataclasses import dataclass

import torch

from ..arguments import MoEArguments
from ..matrix import MarlinMatrix
from ..plan.problem import MoEProblem
from ..plan.reference import MoEPlan, plan_moe
from ..scratch import Lease

Buffers = dict[str, torch.Tensor]


def reason_against(problem: MoEProblem) -> str | None:
    """Why this backend cannot run a problem, or None."""
    if problem.device_type == "meta":
        return "it reads the routing, and a meta tensor has no values"
    return None


def run(arguments: MoEArguments, out: torch.Tensor, lease: Lease) -> None:
    """Write the layer's output for x [M, H] into out [M, H], one chunk of tokens after another."""
    # Autocast would round the float32 operands.
    with torch.autocast(out.device.type, enabled=False):
        run_chunks(arguments, out, plan_moe(arguments.problem(), lease.plan), lease.buffers)


def run_chunks(arguments: MoEArguments, out: torch.Tensor, plan: MoEPlan, buffers: Buffers) -> None:
    """The chunks of a plan, in the buffers of its workspace."""
    for tokens in plan.chunks():
        chunk = Chunk(
            arguments=arguments,
            x=arguments.x[tokens],
            weights=arguments.topk_weights[tokens],
            routing=route(arguments, arguments.topk_ids[tokens], buffers),
        )
        run_experts(chunk, buffers)
        out[tokens] = weighted_sum(chunk, buffers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """Which rows each expert has.

    Attributes:
        offsets: rows of expert e are offsets[e] .. offsets[e + 1] - 1.
        sorted_slots: int64 [rows]: token * T + slot of each row.
        row_of_slot: int32 [m, T]: the inverse, -1 where a slot reaches no expert of this rank.
    """

    offsets: list[int]
    sorted_slots: torch.Tensor
    row_of_slot: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Tokens that run in one pass: x [m, H], weights [m, T], and where they go."""

    arguments: MoEArguments
    x: torch.Tensor
    weights: torch.Tensor
    routing: Routing


def route(arguments: MoEArguments, topk_ids: torch.Tensor, buffers: Buffers) -> Routing:
    """Sort the slots of topk_ids [m, T] by expert, stably, and write the routing tables."""
    num_experts = arguments.layer.num_experts
    ids = topk_ids.reshape(-1).to(torch.int64)  # [m*T]
    if arguments.expert_map is not None:
        known = (ids >= 0) & (ids < arguments.expert_map.numel())
        ids = torch.where(known, arguments.expert_map[ids * known].to(torch.int64), -1)
    here = (ids >= 0) & (ids < num_experts)
    experts, slots = torch.where(here, ids, num_experts).sort(
        stable=True
    )  # slots that reach no expert come last

    bounds = torch.arange(num_experts + 1, device=ids.device)
    offsets = buffers["expert_offsets"].copy_(torch.searchsorted(experts, bounds)).tolist()
    rows = offsets[-1]
    sorted_slots = buffers["sorted_slots"][:rows].copy_(slots[:rows]).to(torch.int64)
    row_of_slot = buffers["row_of_slot"][: len(slots)].fill_(-1)
    row_of_slot[sorted_slots] = torch.arange(rows, dtype=torch.int32, device=ids.device)
    return Routing(offsets=offsets, sorted_slots=sorted_slots, row_of_slot=row_of_slot.view(topk_ids.shape))


def run_experts(chunk: Chunk, buffers: Buffers) -> None:
    """Both GEMMs and the activation, expert after expert, each on its own rows of the buffers."""
    layer, activation = chunk.arguments.layer, chunk.arguments.activation
    width = layer.padded_intermediate_size
    w13_bias, w2_bias = layer.w13.column_bias(), layer.w2.column_bias()  # [E, N], [E, H]
    for expert in range(layer.num_experts):
        rows = slice(chunk.routing.offsets[expert], chunk.routing.offsets[expert + 1])
        if rows.start == rows.stop:
            continue
        hidden = buffers["w13_output"][rows]  # [n, N]
        matmul(expert_inputs(chunk, rows), layer.w13, expert, out=hidden)
        if w13_bias is not None:
            hidden += w13_bias[expert]
        up = hidden[:, width:] if activation.gated else None
        activated = buffers["activations"][rows].copy_(activation.apply(hidden[:, :width], up))  # [n, Ip]
        result = buffers["w2_output"][rows]  # [n, H]
        matmul(activated, layer.w2, expert, out=result)
        if w2_bias is not None:
            result += w2_bias[expert]


def expert_inputs(chunk: Chunk, rows: slice) -> torch.Tensor:
    """float32 [n, H]: the tokens of these rows, times their router weights if those belong on the input."""
    slots = chunk.routing.sorted_slots[rows]
    inputs = chunk.x[slots // chunk.weights.shape[1]].to(torch.float32)
    if chunk.arguments.apply_router_weight_on_input:
        inputs *= chunk.weights.reshape(-1)[slots].to(torch.float32).unsqueeze(1)
    return inputs


def matmul(rows: torch.Tensor, matrix: MarlinMatrix, expert: int, *, out: torch.Tensor) -> None:
    """out [n, N] = rows [n, K] times one expert of the matrix, in float32 whatever torch's settings allow."""
    dense = matrix.dequantize(torch.tensor([expert], device=rows.device))[0]  # [N, K]
    if float32_is_exact(rows.device):
        torch.mm(rows, dense.t(), out=out)
    else:
        out.copy_(torch.mm(rows.double(), dense.double().t()))


def float32_is_exact(device: torch.device) -> bool:
    """False where the user lets float32 products be rounded to TF32 or bfloat16."""
    backend = torch.backends.cuda if device.type == "cuda" else torch.backends.mkldnn
    return backend.matmul.fp32_precision not in ("tf32", "bf16")


def weighted_sum(chunk: Chunk, buffers: Buffers) -> torch.Tensor:
    """float32 [m, H]: for each token its slots' rows times their weights, added in the order of the slots."""
    total = torch.zeros(chunk.x.shape, dtype=torch.float32, device=chunk.x.device)
    for slot in range(chunk.weights.shape[1]):
        rows = chunk.routing.row_of_slot[:, slot]  # [m]
        tokens = (rows >= 0).nonzero().squeeze(1)
        part = buffers["w2_output"][rows[tokens]]  # [n, H]
        if not chunk.arguments.apply_router_weight_on_input:
            part *= chunk.weights[tokens, slot].to(torch.float32).unsqueeze(1)
        total[tokens] += part
    return total * chunk.arguments.routed_scaling_factor
