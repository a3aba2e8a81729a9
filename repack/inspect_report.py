"""What `inspect` finds in a checkpoint directory: `InspectReport`."""

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from .advice import SplitReport, expert_bytes, padded
from .checkpoint import Checkpoint, shorten
from .experts.find import ExpertsModule
from .rank_facts import workspace_bytes
from .scheme import QuantScheme
from .states import ExpertFacts, MatrixFacts, dtype_name

VLLM_HIDDEN_MULTIPLE = 128
"""What vLLM's Marlin MoE kernel asks of the hidden size; this op asks for 64."""

MAX_TOKENS = 8192
"""Tokens of a pass that scratch memory is planned for: the default of `load_layers`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerReport:
    """A MoE layer that can be repacked.

    Attributes:
        module: its name in the checkpoint.
        num_experts, hidden_size, intermediate_size: E, H, I.
        padded_intermediate_size: I as the Marlin layout holds it, a multiple of 64.
        w13, w2: bits, group size (None is one scale per column), symmetry, act-order.
        w13_source_bits, w2_source_bits: bits in the source: fewer where a matrix is widened, exactly, because
            they do not hold a zero point.
        quant_method: whose tensors the source has.
        fused: the source holds all experts in one 3-D tensor per projection; else they are numbered.
        scales_dtype: in safetensors' spelling: BF16, F16, F32.
        biased: the projections have a bias.
        source_bytes, packed_bytes: of the experts now, and in the Marlin layout with padding.
        dead_projections: projections whose scales are all zero: calibration never reached them.
        split: what the TP x EP split asked for makes of it.
        workspace_bytes: backend -> scratch of the rank that needs most, for 8192 tokens with the config's
            top_k; a device's layers share the largest. Empty where the config names no top_k, or no split.
    """

    module: str
    num_experts: int
    hidden_size: int
    intermediate_size: int
    padded_intermediate_size: int
    w13: MatrixFacts
    w2: MatrixFacts
    w13_source_bits: int
    w2_source_bits: int
    quant_method: str
    fused: bool
    scales_dtype: str
    biased: bool
    source_bytes: int
    packed_bytes: int
    dead_projections: tuple[str, ...]
    split: SplitReport
    workspace_bytes: dict[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class RefusedLayer:
    """A module of packed experts that cannot be repacked, and why: one text per problem."""

    module: str
    problems: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainLayer:
    """A module of experts stored as plain weights (BF16 experts of an MTP layer): carried over unchanged."""

    module: str
    num_experts: int
    dtypes: tuple[str, ...]
    source_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectReport:
    """What a checkpoint directory holds.

    Attributes:
        path: the directory.
        packed: it is a packed checkpoint, else a source.
        quant_method: of the source: `compressed-tensors`, `gptq`, `awq`; None where the config has none.
        num_files, total_bytes: safetensors files and the bytes of their tensors.
        layers: can be repacked, or are packed.
        refused: packed experts that cannot.
        plain_layers: experts that are no WNA16.
        carried_tensors, carried_bytes: everything that is no routed WNA16 expert, plain layers included.
        left_out: safetensors files in the directory that are no part of the checkpoint.
        warnings: what deserves attention and stops nothing.
        problems: what keeps the checkpoint from being repacked, or from the split asked for.
    """

    path: str
    packed: bool
    quant_method: str | None
    num_files: int
    total_bytes: int
    layers: tuple[LayerReport, ...]
    refused: tuple[RefusedLayer, ...]
    plain_layers: tuple[PlainLayer, ...]
    carried_tensors: int
    carried_bytes: int
    left_out: tuple[str, ...]
    warnings: tuple[str, ...]
    problems: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether every layer can be repacked and split as asked."""
        return not self.problems

    def as_dict(self) -> dict[str, Any]:
        """The report for JSON."""
        return {**asdict(self), "ok": self.ok}


def layer_report(
    facts: ExpertFacts,
    scheme: QuantScheme,
    *,
    fused: bool,
    source_bytes: int,
    dead_projections: tuple[str, ...],
    split: SplitReport,
    top_k: int | None,
) -> LayerReport:
    """The report of a layer of these source facts and this scheme; `top_k` as the config names it."""
    intermediate, group_size = facts.intermediate_size, facts.w2.group_size
    one = expert_bytes(facts, intermediate_size=intermediate, w2_group_size=group_size)
    return LayerReport(
        module=facts.module,
        num_experts=facts.num_experts,
        hidden_size=facts.hidden_size,
        intermediate_size=intermediate,
        padded_intermediate_size=padded(intermediate),
        w13=facts.w13,
        w2=facts.w2,
        w13_source_bits=scheme.w13.bits,
        w2_source_bits=scheme.w2.bits,
        quant_method=scheme.quant_method,
        fused=fused,
        scales_dtype=dtype_name(facts.scales_dtype),
        biased=facts.biased,
        source_bytes=source_bytes,
        packed_bytes=facts.num_experts * one,
        dead_projections=dead_projections,
        split=split,
        workspace_bytes=(
            workspace_bytes(facts, tp=split.tp, ep=split.ep, rows=MAX_TOKENS * top_k)
            if split.fits and top_k is not None
            else {}
        ),
    )


def plain_layer(checkpoint: Checkpoint, module: ExpertsModule) -> PlainLayer:
    """The report of a module of plain experts of an open checkpoint."""
    prefix = f"{module.name}." if module.name else ""
    entries = [checkpoint.tensors[prefix + key] for key in module.keys]
    return PlainLayer(
        module=module.name,
        num_experts=len(module.experts),
        dtypes=tuple(sorted({entry.dtype for entry in entries})),
        source_bytes=sum(entry.nbytes for entry in entries),
    )


def warnings_about(layers: Iterable[LayerReport], left_out: Iterable[str]) -> Iterator[str]:
    """What deserves attention and stops nothing, one line each."""
    names = list(left_out)
    if names:
        yield f"left out, because neither index nor name makes them part of the checkpoint: {shorten(names)}"
    sizes: dict[int, list[str]] = {}
    for layer in layers:
        if layer.hidden_size % VLLM_HIDDEN_MULTIPLE:
            sizes.setdefault(layer.hidden_size, []).append(layer.module)
        if layer.dead_projections:
            yield (
                f"{layer.module}: {len(layer.dead_projections)} projections have scales that are all zero: "
                f"{shorten(list(layer.dead_projections), 3)}. Calibration never reached these experts; "
                "repack refuses them unless told --allow-dead-experts"
            )
    for size, modules in sizes.items():
        yield (
            f"hidden size {size} of {shorten(modules, 2)} is no multiple of {VLLM_HIDDEN_MULTIPLE}, which "
            "vLLM's Marlin MoE kernel asks for; this package's op runs it"
        )
