"""A source checkpoint -> a packed one, streamed, resumable, whole or absent: `repack_checkpoint`."""

import time
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from ..kernels.device import usable_device
from .blocks import BLOCK_BYTES, run_blocks
from .checkpoint import Checkpoint, shorten
from .errors import CheckpointError, MarlinMoEWarning
from .native.path import native_path
from .packed.companions import copy_file, write_content
from .packed.durable import system_errors
from .packed.journal import Journal, refuse_nested
from .packed.layer_file import LayerFile
from .packed.load import refuse_dead
from .packed.manifest import Manifest
from .packed.names import MANIFEST, VERSION
from .packed.records import LayerRecord, PlainFileRecord, TensorFileRecord
from .packed.repack_plan import LayerPlan, RepackPlan, offline_context, plan_repack, source_mtimes
from .packed.rest_files import write_rest_file
from .packed.source_checks import source_checks
from .pipeline import Pipeline
from .progress import NoProgress, Progress


@dataclass(frozen=True, slots=True, kw_only=True)
class RepackReport:
    """What a repack did.

    Attributes:
        source, destination: directories.
        seconds: of this run.
        source_bytes, packed_bytes: of the safetensors files; of all files written.
        layers: MoE layers packed.
        files: files of the packed checkpoint, the manifest included.
        resumed_files: of those, finished by an earlier run and left as they were.
        carried_tensors: tensors that are no routed experts.
        carried_files: companions copied: tokenizer, code, ….
        left_out: files of the source that were not copied: other weights, links to folders.
        native_path: what repacked the weights: the C loop, the CUDA kernel or torch operations.
        warnings: what was said.
    """

    source: str
    destination: str
    seconds: float
    source_bytes: int
    packed_bytes: int
    layers: int
    files: int
    resumed_files: int
    carried_tensors: int
    carried_files: tuple[str, ...]
    left_out: tuple[str, ...]
    native_path: str
    warnings: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def repack_checkpoint(
    src: str | Path,
    dst: str | Path,
    *,
    device: torch.device | str | int = "cpu",
    allow_dead_experts: bool = False,
    follow_links: bool = False,
    block_bytes: int = BLOCK_BYTES,
    progress: Progress | None = None,
) -> RepackReport:
    """Write the packed checkpoint of a source: experts in the Marlin layout, everything else unchanged.

    Memory stays at a block of experts, whatever the size of a layer. Files get their names when they are
    complete, the manifest last; a stopped run resumes when it is called again and redoes no finished file.

    Args:
        src: a source checkpoint, which is only read.
        dst: a directory that does not exist, is empty, or holds an interrupted run of the same source.
        device: where the stages run; the bytes are the same everywhere.
        allow_dead_experts: accept a projection whose scales are all zero.
        follow_links: follow links that lead out of the source's directory.
        block_bytes: source bytes that the blocks of experts in flight hold; on a GPU also the pinned memory.
        progress: follows the bytes written.

    Raises:
        MarlinMoEError: a source that cannot be loaded, a destination that is taken, a fault of the system
            with its errno. What is left never loads.
    """
    started = time.monotonic()
    source, destination = Path(src), Path(dst)
    target = usable_device(device)
    refuse_nested(source, destination)
    with Checkpoint(source, follow_links=follow_links) as checkpoint:
        plan = plan_repack(checkpoint, device=target, follow_links=follow_links)
        run = _Run(
            checkpoint=checkpoint,
            plan=plan,
            journal=Journal(destination, _identity(plan)),
            progress=progress or NoProgress(),
            allow_dead_experts=allow_dead_experts,
            block_bytes=block_bytes,
            device=target,
        )
        with run.journal:
            manifest = run.write()
        said = _left_out_warning(source, (*checkpoint.left_out, *plan.companions.left_out))
        return RepackReport(
            source=str(source),
            destination=str(destination),
            seconds=time.monotonic() - started,
            source_bytes=sum(file.size_bytes for file in checkpoint.files.values()),
            packed_bytes=manifest.size_bytes + len(manifest.as_bytes()),
            layers=len(plan.layers),
            files=len(manifest.file_names),
            resumed_files=run.journal.resumed_files,
            carried_tensors=sum(len(file.entries) for file in plan.rest),
            carried_files=plan.companions.names,
            left_out=tuple(sorted({*checkpoint.left_out, *plan.companions.left_out})),
            native_path=str(native_path(target)),
            warnings=said,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    checkpoint: Checkpoint
    plan: RepackPlan
    journal: Journal
    progress: Progress
    allow_dead_experts: bool
    block_bytes: int
    device: torch.device

    def write(self) -> Manifest:
        """Every file that is not finished yet, then the manifest."""
        journal, plan = self.journal, self.plan
        if journal.completed:
            manifest = Manifest.read(journal.destination)
            journal.resumed_files = len(manifest.file_names)
            journal.complete()
            return manifest
        with system_errors(f"{self.checkpoint.path}: reading the sizes of its files"):
            total = plan.total_bytes(self.checkpoint.path)
        self.progress.start(total)
        layers, tensor_files = [], []
        for layer in plan.layers:
            record, file = self._layer(layer)
            layers.append(record)
            tensor_files.append(file)
        for rest in plan.rest:
            done = self._finished(rest.name) or self._finish(
                rest.name, {"file": write_rest_file(self.checkpoint, journal, rest, self.progress).as_json()}
            )
            tensor_files.append(TensorFileRecord.from_json(done["file"]))
        manifest = Manifest(
            layers=tuple(layers),
            tensor_files=tuple(tensor_files),
            plain_files=tuple(self._plain_files()),
            source=plan.source,
        )
        self._refuse_changed_source()
        content = manifest.as_bytes()
        write_content(journal, MANIFEST, content, NoProgress())
        journal.finish(MANIFEST, {"file": {"name": MANIFEST, "size_bytes": len(content)}})
        journal.complete()
        return manifest

    def _layer(self, layer: LayerPlan) -> tuple[LayerRecord, TensorFileRecord]:
        name = layer.file.name
        done = self._finished(name)
        if done is None:
            dead: list[str] = []
            pipeline = Pipeline.offline().insert_after("gather", source_checks(dead))
            context = offline_context(layer.source, self.device, allow_dead_experts=self.allow_dead_experts)
            with LayerFile(
                self.journal, layer.file, layer.source.name, device=self.device, progress=self.progress
            ) as file:
                experts, facts = layer.source.experts, layer.facts
                run_blocks(pipeline, experts, facts, context, file, block_bytes=self.block_bytes)
                record = file.finish()
            done = self._finish(name, {"file": record.as_json(), "dead_projections": dead})
        result = layer.record(tuple(done["dead_projections"]))
        refuse_dead(result, allowed=self.allow_dead_experts)
        return result, TensorFileRecord.from_json(done["file"])

    def _plain_files(self) -> list[PlainFileRecord]:
        records = []
        for name in (*self.plan.companions.names, *self.plan.contents):
            done = self._finished(name)
            if done is None:
                content = self.plan.contents.get(name)
                if content is None:
                    place = self.checkpoint.path / name
                    record = copy_file(place, self.journal, name, self.progress)
                else:
                    record = write_content(self.journal, name, content, self.progress)
                done = self._finish(name, {"file": record.as_json()})
            records.append(PlainFileRecord.from_json(done["file"]))
        return records

    def _finished(self, name: str) -> dict[str, Any] | None:
        done = self.journal.finished(name)
        if done is not None:
            self.progress.advance(done["file"]["size_bytes"], name)
        return done

    def _finish(self, name: str, record: dict[str, Any]) -> dict[str, Any]:
        self.journal.finish(name, record)
        return record

    def _refuse_changed_source(self) -> None:
        with system_errors(f"{self.checkpoint.path}: looking at its files again"):
            now = source_mtimes(self.checkpoint, self.plan.companions)
        changed = [name for name, mtime in self.plan.mtimes_ns.items() if now.get(name) != mtime]
        if changed:
            raise CheckpointError(
                f"{self.checkpoint.path}: expected a source that stays as it is while it is repacked, got "
                f"a change of {shorten(changed)}. Remove {self.journal.destination} and run it again."
            )


def _identity(plan: RepackPlan) -> dict[str, Any]:
    """What has to be the same for a run to be resumed."""
    return {
        "purpose": "repack",
        "version": VERSION,
        "source": plan.source.fingerprint,
        "source_files": [file.name for file in plan.source.files],
        "mtimes_ns": plan.mtimes_ns,
    }


def _left_out_warning(source: Path, left_out: tuple[str, ...]) -> tuple[str, ...]:
    if not left_out:
        return ()
    text = (
        f"{source}: not copied, because they are no part of the checkpoint, weights in another format or "
        f"no regular files: {shorten(sorted(set(left_out)))}."
    )
    warnings.warn(text, MarlinMoEWarning, stacklevel=3)
    return (text,)
