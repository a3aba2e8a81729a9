"""All that a repack will write, before its first byte: layers and their files, rest files, companions."""

import json
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ...kernels.layer import WHOLE
from ..blocks import TensorSpec, plan
from ..check import expert_facts
from ..checkpoint import CONFIG, INDEX, Checkpoint, shorten
from ..errors import CheckpointError, PackedError
from ..layers import MoELayerSource, moe_layers
from ..pipeline import Pipeline
from ..states import Context, ExpertFacts
from ..tensor_file import Stamp, stamp_of
from .companions import Companions, find_companions
from .durable import system_errors
from .integrity import expected_tensors
from .layer_file import plan_layer_file
from .names import SOURCE_CONFIG, SOURCE_FILES, is_packed, layer_files, packed_config
from .records import LayerRecord
from .rest_files import plan_rest_files, rest_tensors
from .source import SourceRecord, describe_source
from .tensor_writer import FilePlan


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerPlan:
    """One MoE layer: where it comes from and the file it becomes."""

    source: MoELayerSource
    facts: ExpertFacts
    file: FilePlan

    def record(self, dead_projections: tuple[str, ...]) -> LayerRecord:
        """The layer in the manifest."""
        module = self.source.experts.module
        return LayerRecord(
            file=self.file.name,
            facts=self.facts,
            scheme=self.source.scheme,
            spelling=module.spelling,
            fused=module.fused,
            dead_projections=dead_projections,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RepackPlan:
    """A whole repack.

    Attributes:
        layers, rest: safetensors files to make.
        companions: files to copy.
        contents: small files by name: configs, index, the source's headers.
        source: the fingerprint.
        stamps: of every source file: one that changes during a run is an error, and what was made of one
            that changed since is looked at again.
    """

    layers: tuple[LayerPlan, ...]
    rest: tuple[FilePlan, ...]
    companions: Companions
    contents: dict[str, bytes]
    source: SourceRecord
    stamps: dict[str, Stamp]


def plan_repack(checkpoint: Checkpoint, *, device: torch.device, follow_links: bool) -> RepackPlan:
    """The plan for an open source. Only headers are read: what they show wrong is refused at once.

    Raises:
        PackedError: the source is packed already.
        ExpertsError, SchemeError: as when it is loaded.
    """
    if is_packed(checkpoint.path):
        raise PackedError(
            f"{checkpoint.path}: expected a source checkpoint, got one that is already packed. Load it as "
            "it is, or unpack it."
        )
    companions = find_companions(checkpoint, follow_links=follow_links)
    stamps = source_stamps(checkpoint, companions)  # before anything is read again
    refuse_change(checkpoint, {name: file.stamp for name, file in checkpoint.files.items()}, stamps)
    sources = moe_layers(checkpoint)
    names = layer_files(list(sources))
    layers = tuple(_plan_layer(source, names[module], device) for module, source in sources.items())
    rest = tuple(plan_rest_files(rest_tensors(checkpoint, list(sources))))
    record, layout = describe_source(checkpoint)
    config = (checkpoint.path / CONFIG).read_bytes()
    if (
        json.loads(config) != checkpoint.config
        or (layout.index and json.loads(layout.index)) != checkpoint.index
    ):
        raise changed_source(checkpoint, [CONFIG, INDEX])
    files = [*(layer.file for layer in layers), *rest]
    weight_map = {name: file.name for file in files for name in file.entries}
    total = sum(entry.nbytes for file in files for entry in file.entries.values())
    contents = {
        SOURCE_CONFIG: config,
        SOURCE_FILES: layout.as_bytes(),
        INDEX: index_text(weight_map, total),
        CONFIG: packed_config(config),
    }
    return RepackPlan(
        layers=layers,
        rest=rest,
        companions=companions,
        contents=contents,
        source=record,
        stamps=stamps,
    )


def index_text(weight_map: dict[str, str], total_bytes: int) -> bytes:
    """`model.safetensors.index.json`, as engines read it."""
    content = {"metadata": {"total_size": total_bytes}, "weight_map": dict(sorted(weight_map.items()))}
    return (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode()


def source_stamps(checkpoint: Checkpoint, companions: Companions) -> dict[str, Stamp]:
    """File name -> its stamp, of all that is read.

    Raises:
        PackedError: one is gone.
    """
    index = [INDEX] if checkpoint.index is not None else []
    names = (CONFIG, *index, *checkpoint.files, *companions.names)
    with system_errors(f"{checkpoint.path}: looking at its files"):
        return {name: stamp_of((checkpoint.path / name).stat()) for name in names}


def refuse_change(checkpoint: Checkpoint, before: Mapping[str, Stamp], now: Mapping[str, Stamp]) -> None:
    """Raise CheckpointError where a file of the source is not what it was."""
    changed = [name for name, stamp in before.items() if now[name] != stamp]
    if changed:
        raise changed_source(checkpoint, changed)


def refuse_new_files(checkpoint: Checkpoint, companions: Companions) -> None:
    """Raise CheckpointError where files have come to the source, or gone, since they were listed."""
    now = find_companions(checkpoint, follow_links=True)
    changed = {*now.names, *now.left_out} ^ {*companions.names, *companions.left_out}
    if changed:
        raise changed_source(checkpoint, sorted(changed))


def changed_source(checkpoint: Checkpoint, names: list[str]) -> CheckpointError:
    """The error of a source that does not stay as it is."""
    return CheckpointError(
        f"{checkpoint.path}: expected a source that stays as it is while it is repacked, got a change of "
        f"{shorten(names)}. Once it stays, run it again: what was made of that is looked at again; after a "
        "change of names, shapes or config remove the destination first."
    )


def offline_context(
    source: MoELayerSource, device: torch.device, *, allow_dead_experts: bool = False
) -> Context:
    """TP = 1, EP = 1, the source's dtype."""
    return Context(
        device=device, tp=WHOLE, ep=WHOLE, scheme=source.scheme, allow_dead_experts=allow_dead_experts
    )


def _plan_layer(source: MoELayerSource, name: str, device: torch.device) -> LayerPlan:
    facts = expert_facts(source.experts, source.scheme)
    result = plan(Pipeline.offline(), source.experts, facts, offline_context(source, device))
    specs = {
        field: TensorSpec(dtype=tensor.dtype, shape=(facts.num_experts, *tensor.shape[1:]))
        for field, tensor in result.tensors()
    }
    layer = LayerPlan(source=source, facts=facts, file=plan_layer_file(name, source.name, specs))
    wanted = {key: shape for key, (_, shape) in expected_tensors(layer.record(())).items()}
    found = {key: entry.shape for key, entry in layer.file.entries.items()}
    if found != wanted:
        raise PackedError(f"{source.name}: expected the stages to give {wanted}, got {found}.")
    return layer
