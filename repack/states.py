"""What flows through the pipeline: `ExpertTensors` in, then a `State` with its `ExpertFacts`.

Letters: B experts of a block, R projections of a matrix (gate and up: 2, down: 1), K x N a matrix, G groups
along K.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeAlias

import torch

from ..kernels.layer import Shard
from .checkpoint import Checkpoint, shorten
from .errors import ExpertsError, PipelineError
from .experts.find import ExpertsModule, below, find_experts
from .experts.fused_source import FusedSource
from .staging import HostMemory
from .tensor_file import DTYPE_NAMES, DTYPES

Shapes: TypeAlias = Mapping[str, tuple[torch.dtype | None, tuple[int, ...]]]
"""Key below a module -> dtype and shape."""


class TensorSource(Protocol):
    """Where tensors are read from."""

    @property
    def fills_any_device(self) -> bool:
        """Whether `read_into` takes tensors of any device; else contiguous CPU tensors."""

    def read_into(self, name: str, out: torch.Tensor) -> None:
        """Fill `out` with tensor `name`."""

    def read_all(self, wanted: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Fill each tensor with the one of its name, in the order that suits the source."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertTensors:
    """The tensors of one module of routed experts, read when asked for.

    Attributes:
        module: how it is found and how its tensors are named.
        shapes: key below the module (`7.gate_proj.weight_packed`) -> (dtype, shape).
        source: reads a tensor by its full name.
    """

    module: ExpertsModule
    shapes: Mapping[str, tuple[torch.dtype | None, tuple[int, ...]]]
    source: TensorSource

    @classmethod
    def from_mapping(
        cls, tensors: Mapping[str, torch.Tensor] | Any, *, module: str = "experts"
    ) -> "ExpertTensors":
        """Experts of tensors by their names below the module, e.g. `{"7.gate_proj.weight_packed": …}`."""
        if not isinstance(tensors, Mapping):
            kind = type(tensors).__name__
            raise TypeError(f"experts: expected a mapping of names to tensors or ExpertTensors, got {kind}.")
        for name, tensor in tensors.items():
            if not isinstance(name, str):
                kind = type(name).__name__
                raise TypeError(f"experts: expected keys that are str, tensors' names, got {kind} {name!r}.")
            if not isinstance(tensor, torch.Tensor):
                raise TypeError(f"{module}.{name}: expected a torch.Tensor, got {type(tensor).__name__}.")
        prefix = f"{module}." if module else ""
        named = {prefix + name: tensor for name, tensor in tensors.items()}
        found = find_experts(named).get(module)
        if found is None:
            seen = ", ".join(list(tensors)[:3]) or "no tensors"
            raise ExpertsError(
                f"{module}: expected names below the experts module, such as 7.gate_proj.weight_packed, got "
                f"{seen}."
            )
        shapes = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
        return cls._seen(found, shapes, MappingSource(named))

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint, module: ExpertsModule) -> "ExpertTensors":
        """Experts of an open checkpoint; nothing is read yet."""
        entries = {
            key: checkpoint.tensors[f"{module.name}.{key}"] for key in below(module.name, checkpoint.tensors)
        }
        shapes = {key: (DTYPES.get(entry.dtype), entry.shape) for key, entry in entries.items()}
        return cls._seen(module, shapes, checkpoint)

    @classmethod
    def _seen(
        cls, module: ExpertsModule, shapes: Shapes, source: "MappingSource | Checkpoint"
    ) -> "ExpertTensors":
        """The experts as numbered ones, also where 3-D tensors hold them."""
        if module.fused is None:
            return cls(module=module, shapes=shapes, source=source)
        spelling, layout = module.spelling, module.fused
        names = {"gate": spelling.gate, "up": spelling.up, "down": spelling.down}
        views = {
            f"{expert}.{names[role]}.{tensor.field}": (shapes[key][0], tensor.view_shape)
            for key, tensor in layout.tensors.items()
            for role in tensor.roles
            for expert in module.experts
        }
        prefix = f"{module.name}." if module.name else ""
        reader = FusedSource(prefix=prefix, layout=layout, spelling=spelling, source=source)
        others = {key: shape for key, shape in shapes.items() if key not in layout.tensors}
        return cls(module=module, shapes=views | others, source=reader)

    @property
    def name(self) -> str:
        """The module's name in the checkpoint."""
        return self.module.name

    @property
    def stored_in(self) -> Any:
        """The checkpoint, or the `MappingSource` of tensors in memory; also of experts in 3-D tensors."""
        return self.source.source if isinstance(self.source, FusedSource) else self.source

    @property
    def in_memory(self) -> bool:
        """Whether somebody passed the tensors, so that what is missing was not passed."""
        return isinstance(self.stored_in, MappingSource)

    def full_name(self, key: str) -> str:
        """The name in the checkpoint of a key below the module."""
        return f"{self.name}.{key}" if self.name else key

    def stored_key(self, key: str) -> str:
        """The key below the module of the tensor that holds `key`: another one where experts are fused."""
        expert, _, rest = key.partition(".")
        projection, _, field = rest.partition(".")
        role = {name: role for role, name in self.module.spelling.roles}.get(projection)
        if self.module.fused is None or role is None or not expert.isdigit():
            return key
        return self.module.fused.key_of(role, field)

    def label(self, key: str) -> str:
        """A key for messages: the tensor's name in the checkpoint, and the part of it where that is fused."""
        stored = self.stored_key(key)
        if stored == key:
            return self.full_name(key)
        expert, projection, _ = key.split(".")
        return f"{self.full_name(stored)} (expert {expert}, {projection})"

    def dtype_name(self, key: str) -> str:
        """The dtype of a key for messages, in safetensors' spelling, also where torch has none."""
        dtype = self.shapes[key][0]
        source = self.stored_in
        if dtype is None and isinstance(source, Checkpoint):
            return source.tensors[self.full_name(self.stored_key(key))].dtype
        return dtype_name(dtype)

    def check_values(self) -> None:
        """Raise ExpertsError where tensors in memory lie on meta, which has no values to make a layer of."""
        source = self.stored_in
        tensors = source.tensors if isinstance(source, MappingSource) else {}
        empty = [name for name, tensor in tensors.items() if tensor.is_meta]
        if empty:
            raise ExpertsError(
                f"{self.name}: expected tensors with values, because a layer is made of them, got "
                f"{shorten(empty)} on meta. Load the tensors onto a device first."
            )

    def read_into(self, key: str, out: torch.Tensor) -> None:
        """Fill `out` (CPU, contiguous) with the tensor at `key` below the module."""
        self.source.read_into(self.full_name(key), out)

    def read_all(self, wanted: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Fill each tensor (CPU, contiguous) with that at its key below the module."""
        self.source.read_all((self.full_name(key), out) for key, out in wanted)

    def read(self, key: str) -> torch.Tensor:
        """A new CPU tensor with the values at `key` below the module."""
        dtype, shape = self.shapes[key]
        out = torch.empty(shape, dtype=dtype, device="cpu")
        self.read_into(key, out)
        return out


@dataclass(frozen=True, slots=True)
class MappingSource:
    """`TensorSource` over tensors in memory."""

    tensors: Mapping[str, torch.Tensor]
    fills_any_device: bool = True

    def read_into(self, name: str, out: torch.Tensor) -> None:
        """Copy tensor `name` into `out`."""
        out.copy_(self.tensors[name].detach())

    def read_all(self, wanted: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy the named tensors."""
        for name, out in wanted:
            self.read_into(name, out)

    def read_part_into(self, name: str, start: int, out: torch.Tensor) -> None:
        """Copy the elements of tensor `name` from `start` on into `out`."""
        flat = self.tensors[name].detach().reshape(-1)
        out.copy_(flat[start : start + out.numel()].view(out.shape))


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixFacts:
    """How w13 or w2 is quantized at this point of the pipeline.

    `group_size` is inputs per scale, None where the matrix had one group along K in the source.
    """

    bits: int
    group_size: int | None
    symmetric: bool
    act_order: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertFacts:
    """The layer that a block belongs to, at this point of the pipeline.

    Attributes:
        module: its name in the checkpoint.
        num_experts: experts of the whole layer.
        hidden_size: H.
        intermediate_size: I of this rank, unpadded (before `shard`: of the source).
        padded_intermediate_size: I as the tensors hold it.
        gated: w13 is [gate; up]; else up alone.
        w13, w2: their quantization.
        scales_dtype: of the source's scales.
        biased: the projections have a bias.
    """

    module: str
    num_experts: int
    hidden_size: int
    intermediate_size: int
    padded_intermediate_size: int
    gated: bool
    w13: MatrixFacts
    w2: MatrixFacts
    scales_dtype: torch.dtype
    biased: bool = False

    @property
    def halves(self) -> int:
        """R of w13: 2 when gated."""
        return 2 if self.gated else 1


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """A block of experts between two stages.

    Attributes:
        experts: the block's experts, counted over the whole layer.
        facts: of the layer at this point.
        fields: field name -> tensor [B, …] (or object, for `expert_tensors` and `workspace`).
    """

    experts: range
    facts: ExpertFacts
    fields: Mapping[str, Any]

    def __getitem__(self, name: str) -> Any:
        """The field `name`; PipelineError when no stage wrote it."""
        if name not in self.fields:
            raise PipelineError(
                f"{name}: expected a stage before this one to write it, got {', '.join(self.fields)}."
            )
        return self.fields[name]

    def get(self, name: str) -> Any:
        """The field `name`, or None where the layer has none (zero points of a symmetric one, …)."""
        return self.fields.get(name)

    def evolve(
        self,
        written: Mapping[str, Any] | None = None,
        *,
        facts: ExpertFacts | None = None,
        drop: tuple[str, ...] = (),
        **named: Any,
    ) -> "State":
        """A new state with fields dropped, then fields written; writing None drops the field too."""
        new = {**(written or {}), **named}
        gone = {*drop, *new}
        kept = {name: value for name, value in self.fields.items() if name not in gone}
        kept.update({name: value for name, value in new.items() if value is not None})
        return replace(self, facts=facts or self.facts, fields=kept)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(field name, tensor) of the fields that are tensors."""
        for name, value in self.fields.items():
            if isinstance(value, torch.Tensor):
                yield name, value


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """What every stage is told besides its state.

    Attributes:
        device: where the stages run and the layer lies.
        tp, ep: this rank.
        dtype: of scales and bias in the result; None keeps the source's.
        scheme: the layer's `QuantScheme`.
        destination: Marlin field -> where this block's part of the result belongs; a stage may write there
            and return the same tensor, which saves a copy. Empty where nothing is allocated yet.
        problems: collected over all blocks and raised together as one error at the end of the layer.
        allow_dead_experts: accept a projection whose scales are all zero.
        top_k, max_tokens: for the workspace.
        staging: where a stage that reads files reads them; the next block is read over it. None where it
            reads into memory of its own.
    """

    device: torch.device
    tp: Shard
    ep: Shard
    scheme: Any
    dtype: torch.dtype | None = None
    destination: Mapping[str, torch.Tensor] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    allow_dead_experts: bool = False
    top_k: int | None = None
    max_tokens: int = 8192
    staging: HostMemory | None = None


def dtype_name(dtype: torch.dtype | None) -> str:
    """A dtype for messages, in safetensors' spelling."""
    return "an unknown dtype" if dtype is None else DTYPE_NAMES.get(dtype, str(dtype))
