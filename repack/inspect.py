"""A checkpoint directory -> what its MoE layers are, and whether Marlin can run them: `InspectReport`.

Reads headers, and of the scales enough to tell a dead expert. An error of one layer does not hide the others.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from ..kernels.layer import Shard
from .advice import split_report
from .check import SCALE_FIELDS, expert_facts
from .checkpoint import Checkpoint, shorten
from .errors import CheckpointError, ExpertsError, MarlinMoEError
from .experts.find import NUMBERED_KEY, ExpertsModule, below, find_experts, natural
from .experts.fused import HasShape, split_key
from .experts.fused_source import FusedSource
from .inspect_packed import inspect_packed
from .inspect_report import (
    InspectReport,
    LayerReport,
    RefusedLayer,
    layer_report,
    plain_layer,
    warnings_about,
)
from .layers import layer_source
from .model_path import model_path
from .packed.names import is_packed
from .states import ExpertTensors

SAMPLE_BYTES = 4096
"""Of each projection's scales; they are read whole only where these are all zero."""


def inspect_checkpoint(
    path: str | Path, *, tp: int = 1, ep: int = 1, follow_links: bool = False
) -> InspectReport:
    """What the MoE layers of a checkpoint directory are, and what a TP x EP split would make of them.

    Args:
        path: a source checkpoint or a packed one, or `org/model` on the Hugging Face Hub.
        tp: ranks to split each layer's intermediate size over.
        ep: ranks to split its experts over.
        follow_links: follow links out of the directory.

    Raises:
        CheckpointError: a directory whose files or config cannot be read at all. What is wrong with single
            layers is in the report.
    """
    Shard(0, tp), Shard(0, ep)  # refuses sizes below 1 before anything is read
    path = model_path(path)
    if is_packed(path):
        return inspect_packed(path, tp=tp, ep=ep)
    with Checkpoint(path, follow_links=follow_links) as checkpoint:
        modules, refused = _experts_modules(checkpoint.tensors)
        layers = []
        for module in (m for m in modules.values() if m.quantized):
            found = _layer(checkpoint, module, tp=tp, ep=ep)
            if isinstance(found, LayerReport):
                layers.append(found)
            else:
                refused.append(found)
        refused.sort(key=lambda layer: natural(layer.module))
        experts = {
            f"{module.name}.{key}"
            for module in modules.values()
            if module.quantized
            for key in below(module.name, checkpoint.tensors)
        }
        carried = [entry for name, entry in checkpoint.tensors.items() if name not in experts]
        return InspectReport(
            path=str(path),
            packed=False,
            quant_method=_quant_method(checkpoint),
            num_files=len(checkpoint.files),
            total_bytes=sum(entry.nbytes for entry in checkpoint.tensors.values()),
            layers=tuple(layers),
            refused=tuple(refused),
            plain_layers=tuple(plain_layer(checkpoint, m) for m in modules.values() if not m.quantized),
            carried_tensors=len(carried),
            carried_bytes=sum(entry.nbytes for entry in carried),
            left_out=tuple(checkpoint.left_out),
            warnings=tuple(warnings_about(layers, checkpoint.left_out)),
            problems=tuple(_problems(checkpoint, layers, refused)),
        )


def _experts_modules(
    tensors: Mapping[str, HasShape],
) -> tuple[dict[str, ExpertsModule], list[RefusedLayer]]:
    """Every experts module, and those of unknown spelling or shapes, one by one."""
    try:
        return find_experts(tensors), []
    except ExpertsError:
        pass  # some module is refused: look at each alone, so that the others are seen
    by_module: dict[str, dict[str, HasShape]] = {}
    for name, tensor in tensors.items():
        by_module.setdefault(_module_of(name), {})[name] = tensor
    modules: dict[str, ExpertsModule] = {}
    refused = []
    for module, members in sorted(by_module.items(), key=lambda item: natural(item[0])):
        try:
            modules |= find_experts(members)
        except ExpertsError as error:
            refused.append(_refused(module, error))
    return modules, refused


def _module_of(name: str) -> str:
    """The module that would hold this tensor, were it an expert's, numbered or 3-D."""
    if match := NUMBERED_KEY.fullmatch(name):
        return match["module"] or ""
    parent, _, last = name.rpartition(".")
    above, _, projection = parent.rpartition(".")
    if split_key(f"{projection}.{last}") is not None:  # gate_up_proj.weight_packed
        return above
    return parent if split_key(last) is not None else ""  # gate_up_proj_packed


def _layer(checkpoint: Checkpoint, module: ExpertsModule, *, tp: int, ep: int) -> LayerReport | RefusedLayer:
    try:
        source = layer_source(checkpoint, checkpoint.quantization_config, module)
        experts, facts = source.experts, expert_facts(source.experts, source.scheme)
        zero, not_finite = _bad_scales(checkpoint, experts)
    except MarlinMoEError as error:
        return _refused(module.name, error)
    if not_finite:
        problem = (
            f"{module.name}: expected finite scales, got NaN or Inf in {len(not_finite)} projections: "
            f"{shorten(not_finite)}. Calibration never reached them; quantize again with more data."
        )
        return RefusedLayer(module=module.name, problems=(problem,))
    entries = [checkpoint.tensors[experts.full_name(key)] for key in below(module.name, checkpoint.tensors)]
    return layer_report(
        facts,
        source.scheme,
        fused=module.fused is not None,
        source_bytes=sum(entry.nbytes for entry in entries),
        dead_projections=tuple(zero),
        split=split_report(facts, tp=tp, ep=ep),
        top_k=checkpoint.top_k,
    )


def _refused(module: str, error: MarlinMoEError) -> RefusedLayer:
    """The error's problems, one text each, without the headline that counts them."""
    headline, *problems = str(error).splitlines()
    counted = headline == f"{module}: {len(problems)} problems."
    return RefusedLayer(module=module, problems=tuple(problems if counted else [headline, *problems]))


def _bad_scales(checkpoint: Checkpoint, experts: ExpertTensors) -> tuple[list[str], list[str]]:
    """Projections whose scales are all zero, and those with NaN or Inf in their first 4 KiB.

    Repacking looks at every value; here a layer of hundreds of experts has to be told in no time.
    """
    zero, not_finite = [], []
    for key in experts.shapes:
        if not key.endswith(SCALE_FIELDS):
            continue
        sample, name = _sample(checkpoint, experts, key), experts.full_name(key)
        if not torch.isfinite(sample).all():
            not_finite.append(name.rpartition(".")[0])
        elif not sample.any() and not experts.read(key).any():
            zero.append(name.rpartition(".")[0])
    return zero, not_finite


def _sample(checkpoint: Checkpoint, experts: ExpertTensors, key: str) -> torch.Tensor:
    """The first values that lie together of one projection's scales."""
    dtype, shape = experts.shapes[key]
    if dtype is None:
        raise ExpertsError(f"{experts.full_name(key)}: expected scales of a dtype that is known.")
    name, start, count = experts.full_name(key), 0, torch.Size(shape).numel()
    if isinstance(experts.source, FusedSource):
        tensor, expert, role = experts.source.find(key)
        name, (start, count) = experts.full_name(tensor.key), tensor.stretch(expert, role)
    sample = torch.empty(min(count, SAMPLE_BYTES // dtype.itemsize), dtype=dtype, device="cpu")
    checkpoint.read_part_into(name, start, sample)
    return sample


def _quant_method(checkpoint: Checkpoint) -> str | None:
    try:
        method = checkpoint.quantization_config.get("quant_method", "compressed-tensors")
    except CheckpointError:
        return None  # a problem of every layer with packed experts, and reported with each
    return str(method)


def _problems(
    checkpoint: Checkpoint, layers: list[LayerReport], refused: list[RefusedLayer]
) -> Iterator[str]:
    if not layers and not refused:
        yield (
            f"{checkpoint.path}: expected routed experts with packed weights (such as "
            f"…experts.0.gate_proj.weight_packed), got none among {len(checkpoint.tensors)} tensors. "
            "This is no WNA16 MoE checkpoint."
        )
    for module in refused:
        yield from module.problems
    for layer in layers:
        if layer.split.problem is not None:
            yield layer.split.problem
