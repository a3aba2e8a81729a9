"""The files of a packed checkpoint, each made by itself: layers, carried tensors, companions, configs."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ..blocks import run_blocks
from ..checkpoint import Checkpoint
from ..pipeline import Pipeline
from ..progress import Progress
from .companions import copy_file, write_content
from .journal import Journal
from .layer_file import LayerFile
from .load import refuse_dead
from .manifest import Manifest
from .records import LayerRecord, PlainFileRecord, TensorFileRecord
from .repack_plan import LayerPlan, RepackPlan, offline_context
from .rest_files import write_rest_file
from .source_checks import source_checks
from .tensor_writer import FilePlan

Records = dict[str, dict[str, Any]]
"""File name -> what the journal says: `file`, `stamps` of its sources, of a layer `dead_projections`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileTask:
    """One file to make; `make` writes it whole, publishes it and gives the journal's record of it.

    Layers are made before the rest: a source with values that are refused leaves no other files.

    Attributes:
        plan: a LayerPlan, a FilePlan, or of another file its name.
        sources: the source's files that its bytes come from; none of a file that the fingerprint decides.
    """

    name: str
    size_bytes: int
    make: Callable[[], dict[str, Any]]
    plan: Any
    sources: tuple[str, ...] = ()

    @property
    def is_layer(self) -> bool:
        """Whether it holds the experts of a layer."""
        return isinstance(self.plan, LayerPlan)


@dataclass(frozen=True, slots=True, kw_only=True)
class FileMaker:
    """Makes the files of a plan.

    Attributes:
        block_bytes: source bytes of the blocks of experts in one file's making.
    """

    checkpoint: Checkpoint
    plan: RepackPlan
    journal: Journal
    progress: Progress
    allow_dead_experts: bool
    block_bytes: int
    device: torch.device

    def tasks(self) -> list[FileTask]:
        """All files but the manifest, the large ones first."""
        plan = self.plan
        tasks = [
            self._task(layer.file.name, layer.file.size_bytes, self._layer, layer) for layer in plan.layers
        ]
        for rest in plan.rest:
            tasks.append(self._task(rest.name, rest.size_bytes, self._rest, rest))
        for name in plan.companions.names:
            size = (self.checkpoint.path / name).stat().st_size
            tasks.append(self._task(name, size, self._companion, name))
        for name, content in plan.contents.items():
            tasks.append(self._task(name, len(content), self._content, name))
        return tasks

    def _task(
        self, name: str, size_bytes: int, make: Callable[[Any], dict[str, Any]], argument: Any
    ) -> FileTask:
        sources = self._sources(argument)

        def finish() -> dict[str, Any]:
            record = make(argument) | {"stamps": self.stamps(sources)}
            self.journal.finish(name, record)
            return record

        return FileTask(name=name, size_bytes=size_bytes, make=finish, plan=argument, sources=sources)

    def _sources(self, plan: LayerPlan | FilePlan | str) -> tuple[str, ...]:
        tensors = self.checkpoint.tensors
        if isinstance(plan, LayerPlan):
            inside = f"{plan.source.name}."
            return tuple(dict.fromkeys(e.file for name, e in tensors.items() if name.startswith(inside)))
        if isinstance(plan, FilePlan):
            return tuple(dict.fromkeys(tensors[name].file for name in plan.entries))
        return () if plan in self.plan.contents else (plan,)

    def stamps(self, sources: tuple[str, ...]) -> dict[str, list[int]]:
        """Of some of the source's files, as they were when this run began."""
        return {name: list(self.plan.stamps[name]) for name in sources}

    def _layer(self, layer: LayerPlan) -> dict[str, Any]:
        dead: list[str] = []
        pipeline = Pipeline.offline().insert_after("gather", source_checks(dead))
        context = offline_context(layer.source, self.device, allow_dead_experts=self.allow_dead_experts)
        with LayerFile(
            self.journal, layer.file, layer.source.name, device=self.device, progress=self.progress
        ) as file:
            experts, facts = layer.source.experts, layer.facts
            run_blocks(pipeline, experts, facts, context, file, block_bytes=self.block_bytes)
            record = file.finish()
        return {"file": record.as_json(), "dead_projections": sorted(dead)}  # whatever the blocks were

    def _rest(self, plan: Any) -> dict[str, Any]:
        return {"file": write_rest_file(self.checkpoint, self.journal, plan, self.progress).as_json()}

    def _companion(self, name: str) -> dict[str, Any]:
        record = copy_file(self.checkpoint.path / name, self.journal, name, self.progress)
        return {"file": record.as_json()}

    def _content(self, name: str) -> dict[str, Any]:
        record = write_content(self.journal, name, self.plan.contents[name], self.progress)
        return {"file": record.as_json()}


def layer_records(plan: RepackPlan, records: Records, *, allow_dead_experts: bool) -> tuple[LayerRecord, ...]:
    """The layers among finished files; ExpertsError for dead experts that are not accepted."""
    layers = []
    for layer in plan.layers:
        if layer.file.name in records:
            layers.append(layer.record(tuple(records[layer.file.name]["dead_projections"])))
            refuse_dead(layers[-1], allowed=allow_dead_experts)
    return tuple(layers)


def manifest_of(plan: RepackPlan, records: Records, *, allow_dead_experts: bool) -> Manifest:
    """The manifest of finished files; the same whoever made them, in whatever order."""
    tensor_files = [*(layer.file.name for layer in plan.layers), *(rest.name for rest in plan.rest)]
    plain_files = [*plan.companions.names, *plan.contents]
    return Manifest(
        layers=layer_records(plan, records, allow_dead_experts=allow_dead_experts),
        tensor_files=tuple(TensorFileRecord.from_json(records[name]["file"]) for name in tensor_files),
        plain_files=tuple(PlainFileRecord.from_json(records[name]["file"]) for name in plain_files),
        source=plan.source,
    )
