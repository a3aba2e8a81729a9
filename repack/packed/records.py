"""What the manifest says of a file, a tensor and a layer, and the same as JSON objects."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ..experts.fused import FusedLayout, FusedTensor
from ..experts.spellings import Spelling
from ..quant_methods.method import SCALE_DTYPES
from ..scheme import QuantScheme, WeightScheme
from ..states import ExpertFacts, MatrixFacts
from ..tensor_file import DTYPE_NAMES, DTYPES
from .decode import decoded


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRecord:
    """One tensor of a packed file: `dtype` in safetensors' spelling, `xxh3_128` of its bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    xxh3_128: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorFileRecord:
    """A safetensors file: the hashes of its header and of every tensor cover each of its bytes.

    A hash over the whole file would ask for a second pass, since the tensors of a layer grow side by side.
    """

    name: str
    size_bytes: int
    header_xxh3_128: str
    tensors: tuple[TensorRecord, ...]

    def as_json(self) -> dict[str, Any]:
        """A JSON object."""
        return asdict(self) | {"tensors": [asdict(t) | {"shape": list(t.shape)} for t in self.tensors]}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "TensorFileRecord":
        """The inverse of `as_json`."""
        own = dict(content)
        tensors = tuple(decoded(TensorRecord, tensor) for tensor in own.pop("tensors"))
        return decoded(cls, own, tensors=tensors)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainFileRecord:
    """A file that is no safetensors file, and the hash of all its bytes.

    `carried` is true for a companion that was copied from the source.
    """

    name: str
    size_bytes: int
    xxh3_128: str
    carried: bool = False

    def as_json(self) -> dict[str, Any]:
        """A JSON object."""
        return asdict(self)

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "PlainFileRecord":
        """The inverse of `as_json`."""
        return decoded(cls, content)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerRecord:
    """One MoE layer of a packed checkpoint.

    Attributes:
        file: where its tensors lie.
        facts: of the source layer: TP = 1, unpadded.
        scheme: as the source's config had it, for `update_weights_`.
        spelling: its projections' names in the source.
        fused: how the source's 3-D tensors hold the experts; None where they are numbered.
        dead_projections: those whose scales are all zero, accepted when it was repacked.
    """

    file: str
    facts: ExpertFacts
    scheme: QuantScheme
    spelling: Spelling
    fused: FusedLayout | None = None
    dead_projections: tuple[str, ...] = ()

    @property
    def module(self) -> str:
        """Its name in the checkpoint."""
        return self.facts.module

    def as_json(self) -> dict[str, Any]:
        """A JSON object."""
        facts = asdict(self.facts) | {"scales_dtype": DTYPE_NAMES[self.facts.scales_dtype]}
        return {
            "module": facts.pop("module"),
            "file": self.file,
            **facts,
            "scheme": asdict(self.scheme),
            "spelling": asdict(self.spelling),
            "fused": None if self.fused is None else _fused_as_json(self.fused),
            "dead_projections": list(self.dead_projections),
        }

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "LayerRecord":
        """The inverse of `as_json`."""
        own = dict(content)
        file, spelling, dead = own.pop("file"), own.pop("spelling"), own.pop("dead_projections")
        scheme, fused = dict(own.pop("scheme")), own.pop("fused")
        matrices = {name: decoded(MatrixFacts, own.pop(name)) for name in ("w13", "w2")}
        weights = {name: decoded(WeightScheme, scheme.pop(name)) for name in ("w13", "w2")}
        facts = decoded(ExpertFacts, own, scales_dtype=DTYPES[own.pop("scales_dtype")], **matrices)
        _refuse_impossible(facts, weights.values())
        return decoded(
            cls,
            {"file": file, "dead_projections": dead},
            facts=facts,
            scheme=decoded(QuantScheme, scheme, **weights),
            spelling=decoded(Spelling, spelling),
            fused=None if fused is None else _fused_from_json(fused),
        )


def _refuse_impossible(facts: ExpertFacts, weights: Iterable[WeightScheme]) -> None:
    """Raise ValueError for facts of no layer that is ever packed."""
    forms: list[MatrixFacts | WeightScheme] = [facts.w13, facts.w2, *weights]
    possible = (
        facts.num_experts > 0
        and facts.hidden_size > 0
        and facts.intermediate_size == facts.padded_intermediate_size > 0
        and facts.scales_dtype in SCALE_DTYPES
        and all(form.bits in (4, 8) for form in forms)
        and all(form.group_size is None or form.group_size > 0 for form in forms)
    )
    if not possible:
        raise ValueError(f"{facts.module}: expected the facts of a WNA16 layer, got {facts}")


def _fused_as_json(layout: FusedLayout) -> dict[str, Any]:
    tensors = [
        asdict(tensor) | {"roles": list(tensor.roles), "shape": list(tensor.shape)}
        for tensor in layout.tensors.values()
    ]
    return {"num_experts": layout.num_experts, "tensors": tensors}


def _fused_from_json(content: Mapping[str, Any]) -> FusedLayout:
    tensors = [decoded(FusedTensor, tensor) for tensor in content["tensors"]]
    for tensor in tensors:
        if len(tensor.shape) not in (2, 3) or 0 in tensor.shape or not tensor.roles:
            raise ValueError(f"{tensor.key}: expected a tensor of all experts, got {tensor}")
    return FusedLayout(tensors={tensor.key: tensor for tensor in tensors}, num_experts=content["num_experts"])
