"""A packed checkpoint -> `InspectReport`, from its manifest and headers."""

from collections.abc import Iterator
from pathlib import Path

from .advice import split_report
from .experts.find import find_experts
from .inspect_report import InspectReport, layer_report, plain_layer, warnings_about
from .packed.reader import PackedCheckpoint
from .packed.records import LayerRecord
from .packed.source import SourceLayout


def inspect_packed(path: Path, *, tp: int, ep: int) -> InspectReport:
    """What the layers of a packed checkpoint are, and what a TP x EP split makes of them.

    Raises:
        PackedError: no valid manifest of this version, or files that are not as it says.
    """
    with PackedCheckpoint(path) as opened:
        manifest, tensors = opened.manifest, opened.checkpoint.tensors
        expert_files = {layer.file for layer in manifest.layers}
        carried = {name: entry for name, entry in tensors.items() if entry.file not in expert_files}
        source = SourceLayout.read(path, manifest.source)
        of_source = {entry.name: entry.nbytes for name in source.headers for entry in source.entries(name)}
        layers = []
        for layer in manifest.layers:
            prefix = f"{layer.module}." if layer.module else ""
            own = [n for name, n in of_source.items() if name.startswith(prefix) and name not in carried]
            layers.append(
                layer_report(
                    layer.facts,
                    layer.scheme,
                    fused=layer.fused is not None,
                    source_bytes=sum(own),
                    dead_projections=tuple(_dead_projections(layer)),
                    split=split_report(layer.facts, tp=tp, ep=ep),
                    top_k=opened.checkpoint.top_k,
                )
            )
        plain = [module for module in find_experts(carried).values() if not module.quantized]
        return InspectReport(
            path=str(path),
            packed=True,
            quant_method=", ".join(sorted({layer.scheme.quant_method for layer in manifest.layers})),
            num_files=len(manifest.tensor_files),
            total_bytes=sum(entry.nbytes for entry in tensors.values()),
            layers=tuple(layers),
            refused=(),
            plain_layers=tuple(plain_layer(opened.checkpoint, module) for module in plain),
            carried_tensors=len(carried),
            carried_bytes=sum(entry.nbytes for entry in carried.values()),
            left_out=(),
            warnings=tuple(warnings_about(layers, [])),
            problems=tuple(layer.split.problem for layer in layers if layer.split.problem is not None),
        )


def _dead_projections(layer: LayerRecord) -> Iterator[str]:
    """The source's names of projections that the manifest calls `7.up`."""
    for name in layer.dead_projections:
        expert, _, role = name.partition(".")
        projection = f"{expert}.{getattr(layer.spelling, role)}"
        yield f"{layer.module}.{projection}" if layer.module else projection
