"""The prefill path: route, GEMM 1 and activation, GEMM 2, sum over slots, on wgmma and the Marlin layout.

    ids -- route --> rows by expert -- GEMM 1, of x --> activations -- GEMM 2 --> by slot -- sum --> out

Four launches, three where a token has one slot: then GEMM 2 writes `out` itself.
"""

import functools
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from ..arguments import MoEArguments
from ..device import architecture
from ..jit.build import compile_all
from ..jit.launch import PreparedLaunch
from ..jit.load import load_kernel
from ..jit.source import KernelSource
from ..jit.spec import BuildSpec
from ..plan import prefill as planner
from ..plan.prefill import GemmVariant, PrefillVariant
from ..plan.problem import LayerFacts
from ..plan.reference import too_few_rows
from ..scratch import Lease
from .cuda_arguments import KINDS, activation_numbers, flags_of
from .cuda_moe import VECTOR_BYTES, as_it_lies, matrices_of, sm_count, with_vector_rows
from .prefill_arguments import (
    DIRECT,
    NO_MAP,
    OUT_ALIGNED,
    PARAMETERS,
    activations_map,
    weight_maps,
    with_maps,
)

ROUTE_BLOCKS, ROUTE_THREADS = 8, 1024
GEMM_THREADS = 384
SUM_THREADS = 256
MOST_X_BYTES = 2**32 - 1  # of a chunk: the kernels' offsets into x have 32 bits


def run(arguments: MoEArguments, out: torch.Tensor, lease: Lease) -> None:
    """Write the layer's output for x [M, H] into out [M, H] on the current stream, in chunks of the lease."""
    x = with_vector_rows(arguments.x)
    weights, ids = as_it_lies(arguments.topk_weights), as_it_lies(arguments.topk_ids)
    expert_map = None if arguments.expert_map is None else as_it_lies(arguments.expert_map)
    facts = arguments.workspace().facts
    tokens, top_k = ids.shape
    chunk = min(tokens, lease.plan.rows // top_k, MOST_X_BYTES // max(1, x.stride(0) * x.element_size()))
    if chunk == 0:
        raise too_few_rows(top_k, lease.plan.rows)
    variant = planner.choose_variant(facts, rows=chunk * top_k)
    layer = arguments.layer
    flags = all_flags(arguments, out)
    matrices, fixed = matrices_of(layer), fixed_numbers(arguments, facts, variant, flags)
    activations = lease.buffers["activations"]
    first_maps = weight_maps(layer.w13) + NO_MAP
    second_maps = weight_maps(layer.w2) + activations_map(activations)
    launches = prepared(variant, x.device)
    stream = torch.cuda.current_stream(x.device).cuda_stream
    with torch.cuda.device(x.device):
        for start in range(0, tokens, chunk):
            rows = slice(start, start + chunk)
            now = min(chunk, tokens - start)
            parameters = PARAMETERS.pack(
                x[rows].data_ptr(),
                weights[rows].data_ptr(),
                ids[rows].data_ptr(),
                0 if expert_map is None else expert_map.data_ptr(),
                *matrices,
                out[rows].data_ptr(),
                *lease.addresses,
                x.stride(0),
                out.stride(0),
                now,
                top_k,
                *fixed,
            )
            launches.route(stream, parameters)
            launches.first(stream, with_maps(launches.first, parameters, first_maps))
            launches.second(stream, with_maps(launches.second, parameters, second_maps))
            if not flags & DIRECT:
                prepared_sum(facts.scales_dtype, facts.hidden_size, now, x.device)(stream, parameters)


def all_flags(arguments: MoEArguments, out: torch.Tensor) -> int:
    """The flags of a call."""
    aligned = (out.data_ptr() | out.stride(0) * out.element_size()) % VECTOR_BYTES == 0
    return (
        flags_of(
            arguments.topk_ids,
            arguments.topk_weights,
            weight_on_input=arguments.apply_router_weight_on_input,
            slots_fp32=False,
        )
        | DIRECT * (aligned and arguments.topk_ids.shape[1] == 1)
        | OUT_ALIGNED * aligned
    )


def fixed_numbers(
    arguments: MoEArguments, facts: LayerFacts, variant: PrefillVariant, flags: int
) -> tuple[int | float, ...]:
    """The parameters from num_experts on."""
    return (
        facts.num_experts,
        facts.num_global_experts,
        facts.hidden_size,
        facts.padded_intermediate_size,
        KINDS.index(arguments.activation.kind),
        variant.tile.rows,
        variant.tile.mask,
        flags,
        arguments.routed_scaling_factor,
        *activation_numbers(arguments.activation),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillLaunches:
    """The launches of a variant, but for the sum's, whose grid depends on the tokens."""

    route: PreparedLaunch
    first: PreparedLaunch
    second: PreparedLaunch


@functools.lru_cache(maxsize=256)
def prepared(variant: PrefillVariant, device: torch.device) -> PrefillLaunches:
    """The launches of a variant on a device: loaded, from the cubin cache or compiled."""
    route = load_kernel(route_spec(fp16=variant.first.fp16), device, kernel="prefill_route")
    return PrefillLaunches(
        route=route.prepare(grid=ROUTE_BLOCKS, block=ROUTE_THREADS),
        first=_prepared_gemm(variant.first, device),
        second=_prepared_gemm(variant.second, device),
    )


def _prepared_gemm(variant: GemmVariant, device: torch.device) -> PreparedLaunch:
    kernel = load_kernel(build_spec(variant), device)
    grid = variant.tile.blocks_per_sm * sm_count(device)
    return kernel.prepare(grid=grid, block=GEMM_THREADS, smem_bytes=variant.smem_bytes)


@functools.lru_cache(maxsize=1024)
def prepared_sum(dtype: torch.dtype, hidden_size: int, tokens: int, device: torch.device) -> PreparedLaunch:
    """The launch of the sum over slots for a number of tokens."""
    kernel = load_kernel(route_spec(fp16=dtype == torch.float16), device, kernel="prefill_sum")
    return kernel.prepare(grid=-(-tokens * (hidden_size // 8) // SUM_THREADS), block=SUM_THREADS)


def build_spec(variant: GemmVariant) -> BuildSpec:
    """What to compile for a variant."""
    return BuildSpec(
        source=KernelSource(name="prefill_gemm.cu"),
        kernels=("prefill_gemm",),
        arch=planner.ARCHITECTURE,
        constants=variant.constants,
        label=variant.label,
    )


def route_spec(*, fp16: bool) -> BuildSpec:
    """What to compile for the ends of a call."""
    return BuildSpec(
        source=KernelSource(name="prefill_route.cu"),
        kernels=("prefill_route", "prefill_sum"),
        arch=planner.ARCHITECTURE,
        constants={"FP16": fp16},
        label=f"prefill route {'fp16' if fp16 else 'bf16'}",
    )


def specs(facts: Iterable[LayerFacts]) -> list[BuildSpec]:
    """All that the planner can choose for these layers."""
    found: dict[BuildSpec, None] = {}
    for layer in facts:
        found[route_spec(fp16=layer.scales_dtype == torch.float16)] = None
        for variant in planner.variants(layer):
            found[build_spec(variant.first)] = found[build_spec(variant.second)] = None
    return list(found)


def compile_ahead(facts: Iterable[LayerFacts], device: torch.device) -> None:
    """Compile what the planner can choose for these layers, and load it on the device."""
    layers = list(facts)
    if architecture(device) != planner.ARCHITECTURE:
        return
    compile_all(specs(layers))
    for layer in layers:
        for variant in planner.variants(layer):
            prepared(variant, device)
