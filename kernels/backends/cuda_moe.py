"""The CUDA backend: a layer in one cooperative launch of `cuda/moe.cu`, compiled for the layer's format.

The grid is as large as the device holds at once, so that its blocks may wait for each other at the driver's
own grid barrier. Any number of streams may call: the driver starts a cooperative grid when all of it fits.
"""

import functools
from collections.abc import Iterable

import torch

from ..arguments import MoEArguments
from ..device import architecture, reason_against_kernels
from ..jit.build import compile_all
from ..jit.launch import PreparedLaunch
from ..jit.load import load_kernel
from ..jit.source import KernelSource
from ..jit.spec import BuildSpec
from ..layer import MarlinMoELayer
from ..plan import cuda_moe as planner
from ..plan.problem import LayerFacts, MoEProblem
from ..plan.reference import too_few_rows
from ..plan.variant import KernelVariant
from ..scratch import Lease
from .cuda_arguments import KINDS, PARAMETERS, activation_numbers, flags_of, matrix_addresses

VECTOR_BYTES = 16


def reason_against(problem: MoEProblem) -> str | None:
    """Why this backend cannot run a problem, or None."""
    reason = planner.reason_against(problem)
    if reason is not None:
        return reason
    return reason_against_kernels()


def run(arguments: MoEArguments, out: torch.Tensor, lease: Lease) -> None:
    """Write the layer's output for x [M, H] into out [M, H] on the current stream, in chunks of the lease."""
    x, weights, ids = (
        with_vector_rows(arguments.x),
        as_it_lies(arguments.topk_weights),
        as_it_lies(arguments.topk_ids),
    )
    expert_map = None if arguments.expert_map is None else as_it_lies(arguments.expert_map)
    facts = arguments.workspace().facts
    tokens, top_k = ids.shape
    chunk = lease.plan.rows // top_k
    if chunk == 0:
        raise too_few_rows(top_k, lease.plan.rows)
    slots = min(tokens, chunk) * top_k
    variant = planner.choose_variant(facts, rows=slots, arch=architecture(x.device))
    launch = prepared(variant, facts.num_experts, slots, x.device)
    stream = torch.cuda.current_stream(x.device).cuda_stream
    matrices, numbers = (
        matrices_of(arguments.layer),
        fixed_numbers(arguments, variant, rows=slots),
    )
    with torch.cuda.device(x.device):
        for start in range(0, tokens, chunk):
            rows = slice(start, start + chunk)
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
                min(chunk, tokens - start),
                top_k,
                *numbers,
            )
            launch(stream, parameters)


def matrices_of(layer: MarlinMoELayer) -> tuple[int, ...]:
    """The addresses of both MatrixArgs."""
    return (*matrix_addresses(layer.w13), *matrix_addresses(layer.w2))


def fixed_numbers(arguments: MoEArguments, variant: KernelVariant, *, rows: int) -> tuple[int | float, ...]:
    """The parameters from num_experts on, for launches of at most `rows` rows."""
    facts = arguments.workspace().facts
    flags = flags_of(
        arguments.topk_ids,
        arguments.topk_weights,
        weight_on_input=arguments.apply_router_weight_on_input,
        slots_fp32=rows <= planner.FP32_ROWS,
    )
    return (
        facts.num_experts,
        facts.num_global_experts,
        facts.hidden_size,
        facts.padded_intermediate_size,
        KINDS.index(arguments.activation.kind),
        planner.split_capacity(planner.BLOCKS_PER_SM * sm_count(arguments.x.device)),
        _most_parts(facts, variant, rows, architecture(arguments.x.device)),
        arguments.routed_scaling_factor,
        *activation_numbers(arguments.activation),
        flags,
    )


def _most_parts(facts: LayerFacts, variant: KernelVariant, rows: int, arch: str) -> int:
    """Into how many parts of K the slots' sums may be cut."""
    if variant.kernel == "decode":
        return planner.most_slot_parts(facts, rows=rows, arch=arch)
    return planner.FP32_ROWS // rows if rows <= planner.FP32_ROWS else 1


def has_vector_rows(x: torch.Tensor) -> bool:
    """Whether x's rows can be read as they lie, in vectors of 16 bytes."""
    row_bytes = x.stride(0) * x.element_size()
    aligned = row_bytes % VECTOR_BYTES == 0 and x.data_ptr() % VECTOR_BYTES == 0
    return x.stride(1) == 1 and aligned and not x.is_neg()


def with_vector_rows(x: torch.Tensor) -> torch.Tensor:
    """x, or a copy of it where its rows cannot be read so."""
    return x if has_vector_rows(x) else x.clone(memory_format=torch.contiguous_format)


def as_it_lies(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy whose values are its bytes in order: contiguous, and not negated lazily."""
    return tensor.resolve_neg().contiguous()


def prepared(variant: KernelVariant, num_experts: int, slots: int, device: torch.device) -> PreparedLaunch:
    """The launch of a variant on a device: loaded, from the cubin cache or compiled, with its grid."""
    return _launch(variant, variant.smem_bytes(num_experts=num_experts, slots=slots), device)


@functools.lru_cache(maxsize=1024)
def _launch(variant: KernelVariant, smem_bytes: int, device: torch.device) -> PreparedLaunch:
    kernel = load_kernel(build_spec(variant, architecture(device)), device)
    per_sm = min(kernel.max_blocks_per_sm(variant.threads, smem_bytes), variant.blocks_per_sm)
    grid = max(1, per_sm) * sm_count(device)  # where not even one fits, preparing says so
    return kernel.prepare(grid=grid, block=variant.threads, smem_bytes=smem_bytes, cooperative=True)


def build_spec(variant: KernelVariant, arch: str) -> BuildSpec:
    """What to compile for a variant."""
    return BuildSpec(
        source=KernelSource(name=variant.source),
        kernels=(variant.kernel,),
        arch=arch,
        constants=variant.constants,
        label=variant.label,
    )


def compile_ahead(variants: Iterable[KernelVariant], arch: str) -> None:
    """Compile variants into the cache, several at once."""
    compile_all(build_spec(variant, arch) for variant in variants)


@functools.lru_cache(maxsize=64)
def sm_count(device: torch.device) -> int:
    """The device's multiprocessors."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
