"""What `inspect` finds in a checkpoint directory: `InspectReport`."""

from dataclasses import asdict, dataclass
from typing import Any

from .advice import SplitReport
from .states import MatrixFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerReport:
    """A MoE layer that can be repacked.

    Attributes:
        module: its name in the checkpoint.
        num_experts, hidden_size, intermediate_size: E, H, I.
        padded_intermediate_size: I as the Marlin layout holds it, a multiple of 64.
        w13, w2: bits, group size (None is one scale per column), symmetry, act-order.
        scales_dtype: in safetensors' spelling: BF16, F16, F32.
        biased: the projections have a bias.
        source_bytes, packed_bytes: of the experts now, and in the Marlin layout with padding.
        dead_projections: projections whose scales are all zero: calibration never reached them.
        split: what the TP x EP split asked for makes of it.
    """

    module: str
    num_experts: int
    hidden_size: int
    intermediate_size: int
    padded_intermediate_size: int
    w13: MatrixFacts
    w2: MatrixFacts
    scales_dtype: str
    biased: bool
    source_bytes: int
    packed_bytes: int
    dead_projections: tuple[str, ...]
    split: SplitReport


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
        quant_method: of the source: `compressed-tensors`; None where the config has none.
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
