"""An open packed checkpoint: manifest, sizes and headers checked, its tensors read when asked for."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Protocol

import torch

from ..checkpoint import Checkpoint, shorten
from ..errors import ExpertsError, PackedError, report
from ..experts.find import ExpertsModule
from ..progress import NoProgress, Progress
from ..states import ExpertTensors
from ..tensor_file import TensorEntry, TensorFile, tensor_bytes
from .integrity import hash_problems, header_problems, layer_problems, own_file_problems, size_problems
from .manifest import Manifest
from .names import tensor_name
from .records import LayerRecord

FIELDS = (
    *(f"{m}_{f}" for m in ("w13", "w2") for f in ("qweight", "scales", "zero_points", "bias")),
    "w13_sort_order",
    "intermediate_order",
)
"""Fields of a packed layer's state."""


class PackedCheckpoint:
    """A packed directory.

    Attributes:
        path: the directory.
        manifest: what it holds.
        checkpoint: the same directory as config, index and tensors.

    Raises:
        PackedError: another version, no manifest, or files that are not as it says; all problems in one text.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.manifest = Manifest.read(self.path)
        problems = [text for _, text in size_problems(self.path, self.manifest)]
        if not problems:
            problems += [text for _, text in layer_problems(self.path, self.manifest)]
            for record in self.manifest.tensor_files:
                problems += [text for _, text in header_problems(self.path, record)]
            problems += own_file_problems(self.path, self.manifest)
        if problems:
            raise PackedError(report(str(self.path), problems))
        self.checkpoint = Checkpoint(self.path)
        if set(self.checkpoint.files) != {file.name for file in self.manifest.tensor_files}:
            self.checkpoint.close()
            raise PackedError(
                f"{self.path}: expected the index to name the files of the manifest, got others. "
                "Repack the source."
            )

    def layers(self, only: Iterable[str] | None = None) -> list[LayerRecord]:
        """The layers, or those named; ExpertsError for a name that is not there."""
        modules = {layer.module: layer for layer in self.manifest.layers}
        names = list(modules) if only is None else list(only)
        unknown = [name for name in names if name not in modules]
        if unknown:
            raise ExpertsError(
                f"only: expected names of MoE layers in {self.path} ({shorten(list(modules))}), "
                f"got {shorten(unknown)}."
            )
        return [layer for name, layer in modules.items() if name in names]

    def experts(self, layer: LayerRecord) -> ExpertTensors:
        """The packed tensors of a layer, expert by expert: `<expert>.<field of the state>`."""
        return packed_experts(self.checkpoint, layer)

    def check_hashes(self, progress: Progress | None = None) -> None:
        """Compare the hash of every tensor and file; PackedError names all that differ."""
        problems = [
            text
            for record in self.manifest.files
            for _, text in hash_problems(self.path, record, progress or NoProgress())
        ]
        if problems:
            raise PackedError(report(str(self.path), problems))

    def close(self) -> None:
        """Close all files."""
        self.checkpoint.close()

    def __enter__(self) -> "PackedCheckpoint":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class OpenTensors(Protocol):
    """Open safetensors files and what lies in them, by name."""

    tensors: dict[str, TensorEntry]
    files: dict[str, TensorFile]


class OneFile:
    """`OpenTensors` of a single open file."""

    def __init__(self, file: TensorFile) -> None:
        self.tensors = dict(file.entries)
        self.files = {file.name: file}


def packed_experts(opened: OpenTensors, layer: LayerRecord) -> ExpertTensors:
    """The packed tensors of a layer, expert by expert: `<expert>.<field of the state>`."""
    entries = {
        field: opened.tensors[name]
        for field in FIELDS
        if (name := tensor_name(layer.module, field)) in opened.tensors
    }
    experts = tuple(range(layer.facts.num_experts))
    module = ExpertsModule(
        name=layer.module, spelling=layer.spelling, experts=experts, keys=(), fields=frozenset(entries)
    )
    shapes = {
        f"{expert}.{field}": (entry.torch_dtype, entry.shape[1:])
        for expert in experts
        for field, entry in entries.items()
    }
    return ExpertTensors(module=module, shapes=shapes, source=PackedSource(opened, layer.module))


@dataclass(frozen=True, slots=True)
class PackedSource:
    """`TensorSource` over the packed tensors of one layer."""

    checkpoint: OpenTensors
    module: str
    fills_any_device: bool = False
    maps: dict[str, torch.Tensor] = field(default_factory=dict)
    """File name -> its bytes, mapped when first asked for."""

    def read_into(self, name: str, out: torch.Tensor) -> None:
        """Fill `out` with the part of one expert; `name` is `<module>.<expert>.<field>`."""
        expert, field = name.removeprefix(f"{self.module}.").split(".")
        self.read_experts(field, int(expert), out.unsqueeze(0))

    def read_all(self, wanted: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Fill the tensors one after another."""
        for name, out in wanted:
            self.read_into(name, out)

    def read_experts(self, field: str, start: int, out: torch.Tensor, *, skip_rows: int = 0) -> None:
        """Fill `out` [B, …] (CPU, contiguous) with a field of experts start, start + 1, ….

        Where `out` has fewer rows (second dimension) than the field, those from `skip_rows` on are read.
        """
        entry = self.checkpoint.tensors[tensor_name(self.module, field)]
        file = self.checkpoint.files[entry.file]
        expert_bytes = entry.nbytes // entry.shape[0]
        if out.shape[1:] == entry.shape[1:]:
            file.read_bytes(entry.offset_bytes + start * expert_bytes, tensor_bytes(out), what=entry.name)
            return
        offset = skip_rows * (expert_bytes // entry.shape[1])
        for i in range(out.shape[0]):
            place = entry.offset_bytes + (start + i) * expert_bytes + offset
            file.read_bytes(place, tensor_bytes(out[i]), what=entry.name)

    def mapped(self, field: str, experts: range) -> torch.Tensor:
        """A field of some experts, as a view of a map of its file, whose length was checked when opened.

        The map is private: what is written to it stays here. The system reads what is touched.
        """
        entry = self.checkpoint.tensors[tensor_name(self.module, field)]
        file = self.checkpoint.files[entry.file]
        if entry.file not in self.maps:
            self.maps[entry.file] = torch.from_file(
                str(file.path), shared=False, size=file.size_bytes, dtype=torch.uint8
            )
        per_expert = entry.nbytes // entry.shape[0]
        start, nbytes = entry.offset_bytes + experts.start * per_expert, len(experts) * per_expert
        data = self.maps[entry.file][start : start + nbytes]
        return data.view(entry.torch_dtype).view(len(experts), *entry.shape[1:])
