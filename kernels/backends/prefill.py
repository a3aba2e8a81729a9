"""The prefill path: route, GEMM 1 and activation, GEMM 2, sum over slots, on wgmma and the Marlin layout.

    ids -- route --> rows by expert -- GEMM 1, of x --> activations -- GEMM 2 --> by slot -- sum --> out

Four launches, three where a token has one slot: then GEMM 2 writes `out` itself.
"""

import functools
from dataclasses import dataclass
from operator import itemgetter

import torch

from ..arguments import MoEArguments
from ..device import sm_count
from ..jit.launch import PreparedLaunch
from ..jit.load import load_kernel
from ..jit.source import KernelSource
from ..jit.spec import BuildSpec
from ..plan import prefill as planner
from ..plan.prefill import GemmVariant, PrefillVariant
from ..plan.problem import LayerFacts
from ..scratch import Lease
from .cuda_arguments import VECTOR_BYTES, activation_numbers, flags_of, matrices_of, sizes_of
from .cuda_pass import CudaPass
from .prefill_arguments import (
    DIRECT,
    MAP_BYTES,
    NO_MAP,
    OUT_ALIGNED,
    PARAMETERS,
    SCRATCH,
    activations_map,
    maps_behind,
    weight_maps,
)

ROUTE_BLOCKS, ROUTE_THREADS = 8, 1024
GEMM_THREADS = 384
SUM_THREADS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillLaunches:
    """The launches of a variant, but for the sum's, whose grid depends on the tokens."""

    route: PreparedLaunch
    first: PreparedLaunch
    second: PreparedLaunch


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillPass(CudaPass):
    """The launches of the prefill path.

    Attributes:
        kernels: those of the variant.
        first_maps, second_maps: what the GEMMs are told behind the arguments. The map of GEMM 2's tokens, the
            activations in the scratch, comes last and is added in each call.
        activations: their width and dtype.
        summed: whether slots are summed; GEMM 2 writes `out` otherwise.
        hidden_size: H.
        device: where.
    """

    kernels: PrefillLaunches
    first_maps: bytes
    second_maps: bytes
    activations: tuple[int, torch.dtype]
    summed: bool
    hidden_size: int
    device: torch.device

    def launch(self, stream: int, parameters: bytes, lease: Lease, tokens: int) -> None:
        """Launch one after the other."""
        kernels = self.kernels
        width, dtype = self.activations
        its_tokens = activations_map(lease.addresses["activations"], lease.plan.rows, width, dtype)
        kernels.route(stream, parameters)
        kernels.first(stream, parameters + self.first_maps)
        kernels.second(stream, parameters + self.second_maps + its_tokens)
        if self.summed:
            prepared_sum(dtype, self.hidden_size, tokens, self.device)(stream, parameters)


def ready_pass(
    arguments: MoEArguments, out: torch.Tensor, facts: LayerFacts, variant: PrefillVariant
) -> PrefillPass:
    """The path's launches for a call that writes into `out`, or into other memory that is aligned like it."""
    layer, device = arguments.layer, arguments.x.device
    aligned = (out.data_ptr() | out.stride(0) * out.element_size()) % VECTOR_BYTES == 0
    direct = aligned and arguments.topk_ids.shape[1] == 1
    flags = flags_of(
        arguments.topk_ids,
        arguments.topk_weights,
        weight_on_input=arguments.apply_router_weight_on_input,
        slots_fp32=False,
    )
    kernels = prepared(variant, device)
    return PrefillPass(
        layout=PARAMETERS,
        scratch=itemgetter(*SCRATCH),
        matrices=matrices_of(layer),
        numbers=(
            *sizes_of(arguments, facts),
            variant.tile.rows,
            variant.tile.mask,
            flags | DIRECT * direct | OUT_ALIGNED * aligned,
            arguments.routed_scaling_factor,
            *activation_numbers(arguments.activation),
        ),
        kernels=kernels,
        first_maps=maps_behind(kernels.first, weight_maps(layer.w13) + NO_MAP),
        second_maps=maps_behind(kernels.second, weight_maps(layer.w2), later_bytes=MAP_BYTES),
        activations=(facts.padded_intermediate_size, facts.scales_dtype),
        summed=not direct,
        hidden_size=facts.hidden_size,
        device=device,
    )


@functools.lru_cache(maxsize=256)
def prepared(variant: PrefillVariant, device: torch.device) -> PrefillLaunches:
    """The launches of a variant on a device, loaded with the sum: from the cubin cache, or compiled."""
    ends = route_spec(fp16=variant.first.fp16)
    route, _ = (load_kernel(ends, device, kernel=name) for name in ends.kernels)
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


def build_specs(variant: PrefillVariant) -> tuple[BuildSpec, ...]:
    """What to compile for a variant."""
    return (
        route_spec(fp16=variant.first.fp16),
        build_spec(variant.first),
        build_spec(variant.second),
    )


def build_spec(variant: GemmVariant) -> BuildSpec:
    """What to compile for a GEMM."""
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
