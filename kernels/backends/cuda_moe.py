"""The CUDA backend: which kernels run a call, and its passes over their chunks of tokens.

Few rows, and any number where `prefill` does not run, are one cooperative launch of `cuda/decode.cu` or
`cuda/moe.cu`, compiled for the layer's format. The grid is as large as the device holds at once, so that its
blocks may wait for each other at the driver's own grid barrier. Any number of streams may call: the driver
starts a cooperative grid when all of it fits.
"""

import functools
from collections.abc import Iterable
from operator import itemgetter

import torch

from ..arguments import MoEArguments
from ..device import architecture, reason_against_kernels, sm_count
from ..jit.build import compile_all
from ..jit.launch import PreparedLaunch
from ..jit.load import load_kernel
from ..jit.source import KernelSource
from ..jit.spec import BuildSpec
from ..plan import cuda_moe as planner
from ..plan.cuda_moe import Variant
from ..plan.prefill import PrefillVariant, most_tokens
from ..plan.problem import LayerFacts, MoEProblem
from ..plan.reference import too_few_rows
from ..plan.variant import KernelVariant
from ..scratch import Lease
from . import prefill
from .cuda_arguments import (
    PARAMETERS,
    SCRATCH,
    activation_numbers,
    as_it_lies,
    flags_of,
    matrices_of,
    sizes_of,
    with_vector_rows,
)
from .cuda_pass import CudaPass, OneLaunch


def reason_against(problem: MoEProblem) -> str | None:
    """Why this backend cannot run a problem, or None."""
    reason = planner.reason_against(problem)
    if reason is not None:
        return reason
    return reason_against_kernels()


def run(arguments: MoEArguments, out: torch.Tensor, lease: Lease) -> None:
    """Write the layer's output for x [M, H] into out [M, H] on the current stream, in chunks of the lease."""
    tokens, top_k = arguments.topk_ids.shape
    rows = min(tokens, lease.plan.rows // top_k) * top_k
    if rows == 0:
        raise too_few_rows(top_k, lease.plan.rows)
    run_variant(choose_variant(arguments, rows=rows), arguments, out, lease, rows=rows)


def run_variant(
    variant: Variant, arguments: MoEArguments, out: torch.Tensor, lease: Lease, *, rows: int
) -> None:
    """`run` with a variant for passes of at most `rows` rows, which the lease has."""
    x, weights, ids = (
        with_vector_rows(arguments.x),
        as_it_lies(arguments.topk_weights),
        as_it_lies(arguments.topk_ids),
    )
    expert_map = None if arguments.expert_map is None else as_it_lies(arguments.expert_map)
    tokens, top_k = ids.shape
    chunk = chunk_tokens(variant, x, top_k, rows=rows)
    ready = ready_pass(arguments, out, variant, rows=rows)
    stream = torch.cuda.current_stream(x.device).cuda_stream
    with torch.cuda.device(x.device):
        for start in range(0, tokens, chunk):
            part, now = slice(start, start + chunk), min(chunk, tokens - start)
            ready(stream, lease, now, x[part], weights[part], ids[part], expert_map, out[part])


def choose_variant(arguments: MoEArguments, *, rows: int) -> Variant:
    """What runs passes of at most `rows` rows of a call."""
    facts = arguments.workspace().facts
    return planner.choose_variant(facts, rows=rows, arch=architecture(arguments.x.device))


def chunk_tokens(variant: Variant, x: torch.Tensor, top_k: int, *, rows: int) -> int:
    """Tokens of a pass over x, of at most `rows` rows."""
    if isinstance(variant, PrefillVariant):
        return min(rows // top_k, most_tokens(x.stride(0) * x.element_size()))
    return rows // top_k


def ready_pass(arguments: MoEArguments, out: torch.Tensor, variant: Variant, *, rows: int) -> CudaPass:
    """A variant's launches for passes of at most `rows` rows into `out`, or memory aligned like it."""
    facts, device = arguments.workspace().facts, arguments.x.device
    if isinstance(variant, PrefillVariant):
        return prefill.ready_pass(arguments, out, facts, variant)
    flags = flags_of(
        arguments.topk_ids,
        arguments.topk_weights,
        weight_on_input=arguments.apply_router_weight_on_input,
        slots_fp32=rows <= planner.FP32_ROWS,
    )
    return OneLaunch(
        layout=PARAMETERS,
        scratch=itemgetter(*SCRATCH),
        matrices=matrices_of(arguments.layer),
        numbers=(
            *sizes_of(arguments, facts),
            planner.split_capacity(planner.BLOCKS_PER_SM * sm_count(device)),
            _most_parts(facts, variant, rows, architecture(device)),
            arguments.routed_scaling_factor,
            *activation_numbers(arguments.activation),
            flags,
        ),
        kernel=prepared(variant, facts.num_experts, rows, device),
    )


def _most_parts(facts: LayerFacts, variant: KernelVariant, rows: int, arch: str) -> int:
    """Into how many parts of K the slots' sums may be cut."""
    if variant.kernel == "decode":
        return planner.most_slot_parts(facts, rows=rows, arch=arch)
    return planner.FP32_ROWS // rows if rows <= planner.FP32_ROWS else 1


def prepared(variant: KernelVariant, num_experts: int, slots: int, device: torch.device) -> PreparedLaunch:
    """The launch of a variant on a device: loaded, from the cubin cache or compiled, with its grid."""
    return _launch(variant, variant.smem_bytes(num_experts=num_experts, slots=slots), device)


@functools.lru_cache(maxsize=1024)
def _launch(variant: KernelVariant, smem_bytes: int, device: torch.device) -> PreparedLaunch:
    kernel = load_kernel(build_spec(variant, architecture(device)), device)
    per_sm = min(kernel.max_blocks_per_sm(variant.threads, smem_bytes), variant.blocks_per_sm)
    grid = max(1, per_sm) * sm_count(device)  # where not even one fits, preparing says so
    early = variant.waits_for_kernel_before and torch.cuda.get_device_capability(device) >= (9, 0)
    return kernel.prepare(
        grid=grid, block=variant.threads, smem_bytes=smem_bytes, cooperative=True, programmatic=early
    )


def build_specs(variant: Variant, arch: str) -> tuple[BuildSpec, ...]:
    """What to compile for a variant."""
    if isinstance(variant, PrefillVariant):
        return prefill.build_specs(variant)
    return (build_spec(variant, arch),)


def build_spec(variant: KernelVariant, arch: str) -> BuildSpec:
    """What to compile for a variant of one kernel."""
    return BuildSpec(
        source=KernelSource(name=variant.source),
        kernels=(variant.kernel,),
        arch=arch,
        constants=variant.constants,
        label=variant.label,
    )


def specs(layers: Iterable[tuple[LayerFacts, int | None]], arch: str) -> list[BuildSpec]:
    """What calls of layers can choose on an architecture, of up to so many rows each: each spec once."""
    return list(
        dict.fromkeys(
            spec
            for facts, rows in dict.fromkeys(layers)
            for variant in planner.possible_variants(facts, rows, arch)
            for spec in build_specs(variant, arch)
        )
    )


def compile_ahead(layers: Iterable[tuple[LayerFacts, int | None]], arch: str) -> None:
    """Compile that into the cache, several at once."""
    compile_all(specs(layers, arch))


def load_ahead(variant: Variant, num_experts: int, device: torch.device) -> None:
    """Load a variant's kernels on a device, from the cubin cache or else compiled."""
    if isinstance(variant, PrefillVariant):
        prefill.prepared(variant, device)
    else:
        prepared(variant, num_experts, 1, device)
