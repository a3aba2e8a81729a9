"""A checkpoint directory -> what its MoE layers are, and whether Marlin can run them: `InspectReport`.

Reads headers, and of the scales enough to tell a dead expert. An error of one layer does not hide the others.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

from ..kernels.layer import Shard
from .advice import split_report
from .check import SCALE_FIELDS, expert_facts
from .checkpoint import Checkpoint, shorten
from .errors import CheckpointError, ExpertsError, MarlinMoEError
from .experts.find import NUMBERED_KEY, ExpertsModule, find_experts, natural
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
from .packed.names import is_packed
from .states import ExpertTensors
from .tensor_file import tensor_bytes

SAMPLE_BYTES = 4096
"""Of each scale tensor; it is read whole only where these are all zero."""


def inspect_checkpoint(
    path: str | Path, *, tp: int = 1, ep: int = 1, follow_links: bool = False
) -> InspectReport:
    """What the MoE layers of a checkpoint directory are, and what a TP x EP split would make of them.

    Args:
        path: a source checkpoint or a packed one.
        tp: ranks to split each layer's intermediate size over.
        ep: ranks to split its experts over.
        follow_links: follow links out of the directory.

    Raises:
        CheckpointError: a directory whose files or config cannot be read at all. What is wrong with single
            layers is in the report.
    """
    Shard(0, tp), Shard(0, ep)  # refuses sizes below 1 before anything is read
    if is_packed(path):
        return inspect_packed(Path(path), tp=tp, ep=ep)
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
            f"{module.name}.{key}" if module.name else key
            for module in modules.values()
            if module.quantized
            for key in module.keys
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


def _experts_modules(names: Iterable[str]) -> tuple[dict[str, ExpertsModule], list[RefusedLayer]]:
    """Every experts module, and those of unknown spelling, one by one."""
    try:
        return find_experts(names), []
    except ExpertsError:
        pass  # some module is refused: look at each alone, so that the others are seen
    by_module: dict[str, list[str]] = {}
    for name in names:
        match = NUMBERED_KEY.fullmatch(name)
        by_module.setdefault((match["module"] or "") if match else "", []).append(name)
    modules: dict[str, ExpertsModule] = {}
    refused = []
    for module, members in sorted(by_module.items(), key=lambda item: natural(item[0])):
        try:
            modules |= find_experts(members)
        except ExpertsError as error:
            refused.append(_refused(module, error))
    return modules, refused


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
    entries = [checkpoint.tensors[experts.full_name(key)] for key in experts.shapes]
    return layer_report(
        facts,
        source_bytes=sum(entry.nbytes for entry in entries),
        dead_projections=tuple(zero),
        split=split_report(facts, tp=tp, ep=ep),
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
        name = experts.full_name(key)
        entry = checkpoint.tensors[name]
        sample = torch.empty(
            min(entry.nbytes, SAMPLE_BYTES) // entry.torch_dtype.itemsize, dtype=entry.torch_dtype
        )
        file = checkpoint.files[entry.file]
        file.read_bytes(entry.offset_bytes, tensor_bytes(sample), what=name)
        if not torch.isfinite(sample).all():
            not_finite.append(name.rpartition(".")[0])
        elif not sample.any() and not checkpoint.read(name).any():
            zero.append(name.rpartition(".")[0])
    return zero, not_finite


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
