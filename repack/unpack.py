"""A packed checkpoint -> the source it was made from, byte for byte: `unpack_checkpoint`."""

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from .blocks import STREAM_BYTES
from .checkpoint import CONFIG, INDEX, shorten
from .errors import PackedError
from .model_path import model_path
from .packed.already import refuse_other_source
from .packed.companions import copy_file, write_content
from .packed.durable import COPY_BYTES, digest
from .packed.journal import Journal, refuse_nested
from .packed.names import SOURCE_CONFIG, SOURCE_FILES, VERSION
from .packed.reader import PackedCheckpoint
from .packed.records import LayerRecord
from .packed.rest_files import read_tensor
from .packed.restore import restored_blocks
from .packed.resume import file_record, is_whole
from .packed.source import SourceLayout
from .packed.source_tensors import parts_of
from .packed.tensor_writer import FilePlan, TensorWriter
from .progress import NoProgress, Progress
from .tensor_file import TensorEntry, tensor_bytes
from .workers import SharedProgress


@dataclass(frozen=True, slots=True, kw_only=True)
class UnpackReport:
    """What an unpacking did.

    Attributes:
        packed, destination: directories.
        seconds: of this run.
        packed_bytes: of the packed checkpoint.
        source_bytes: of the safetensors files written.
        layers: MoE layers restored.
        files: files written: safetensors, index, config, companions.
        tensors: tensors in them.
        resumed_files: finished by an earlier run and left as they were.
        already_complete: an earlier run had finished all of them.
    """

    packed: str
    destination: str
    seconds: float
    packed_bytes: int
    source_bytes: int
    layers: int
    files: int
    tensors: int
    resumed_files: int
    already_complete: bool

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def unpack_checkpoint(
    packed: str | Path,
    dst: str | Path,
    *,
    block_bytes: int = STREAM_BYTES,
    progress: Progress | None = None,
) -> UnpackReport:
    """Write the source of a packed checkpoint again: the same files with the same bytes.

    So also GPTQ's and AWQ's, and 3-D experts; a matrix that was widened to 8 bits is narrowed again.

    All hashes are checked first, so a damaged packed checkpoint gives nothing. Written as `repack` writes:
    file by file, each whole or absent, `config.json` last; a stopped run resumes.

    Args:
        packed: a packed checkpoint.
        dst: a directory that does not exist, is empty, or holds an interrupted or a finished unpacking of the
            same checkpoint.
        block_bytes: packed bytes that one block of experts holds.
        progress: follows the bytes of the hash check and those written.

    Raises:
        PackedError: a packed checkpoint that is not as its manifest says, a destination that is taken, a
            fault of the system with its errno.
    """
    started = time.monotonic()
    path, destination = model_path(packed), Path(dst)
    refuse_nested(path, destination)
    with PackedCheckpoint(path) as opened:
        run = _Run(
            packed=opened,
            layout=SourceLayout.read(path, opened.manifest.source),
            journal=Journal(destination, _identity(opened), last_file=CONFIG),
            progress=SharedProgress(progress or NoProgress()),
            block_bytes=block_bytes,
        )
        with run.journal:
            tensors = run.write()
        return UnpackReport(
            packed=str(path),
            destination=str(destination),
            seconds=time.monotonic() - started,
            packed_bytes=opened.manifest.size_bytes,
            source_bytes=sum(run.layout.sizes.values()),
            layers=len(opened.manifest.layers),
            files=len(run.layout.headers) + len(run.plain_files()),
            tensors=tensors,
            resumed_files=len(run.resumed),
            already_complete=run.journal.completed,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    packed: PackedCheckpoint
    layout: SourceLayout
    journal: Journal
    progress: SharedProgress
    block_bytes: int
    resumed: list[str] = field(default_factory=list)

    def write(self) -> int:
        """Every file that is not finished yet; the number of tensors."""
        plain = self.plain_files()
        plans = [
            FilePlan(name=name, header=header, entries={e.name: e for e in self.layout.entries(name)})
            for name, header in self.layout.headers.items()
        ]
        tensors = sum(len(plan.entries) for plan in plans)
        if self.journal.completed:
            refuse_other_source(
                self.packed, self.journal.destination, self.progress, block_bytes=self.block_bytes
            )
            self.resumed.extend([*(plan.name for plan in plans), *plain])
            self.journal.complete()
            return tensors
        written = sum(plan.size_bytes for plan in plans) + self._plain_bytes(plain)
        self.progress.start(self.packed.manifest.size_bytes + written)
        self.packed.check_hashes(self.progress)
        for plan in plans:
            if not self._is_finished(plan.name):
                self._write_file(plan)
        for name, content in plain.items():  # config.json last: without it a directory is no checkpoint
            if self._is_finished(name):
                continue
            if content is None:
                record = copy_file(self.packed.path / name, self.journal, name, self.progress)
                self.journal.finish(name, {"file": record.as_json()})
            else:
                record = write_content(self.journal, name, content, self.progress)
                self.journal.finish(name, {"file": record.as_json()})
        self.journal.complete()
        return tensors

    def _is_finished(self, name: str) -> bool:
        """Whether an earlier run wrote a file whose every byte is still there."""
        record = file_record(name, self.journal.finished(name) or {})
        if record is None or not is_whole(self.journal.destination, record, self.progress):
            return False
        self.resumed.append(name)
        return True

    def plain_files(self) -> Mapping[str, bytes | None]:
        """Name -> content of the other files; None for a companion that is copied."""
        files: dict[str, bytes | None] = {
            record.name: None for record in self.packed.manifest.plain_files if record.carried
        }
        if self.layout.index is not None:
            files[INDEX] = self.layout.index.encode()
        return files | {CONFIG: (self.packed.path / SOURCE_CONFIG).read_bytes()}

    def _plain_bytes(self, plain: Mapping[str, bytes | None]) -> int:
        carried = sum(record.size_bytes for record in self.packed.manifest.plain_files if record.carried)
        return carried + sum(len(content) for content in plain.values() if content is not None)

    def _write_file(self, plan: FilePlan) -> None:
        """One source file: tensors that were carried, then those of experts, block after block."""
        with TensorWriter(self.journal, plan) as writer:
            buffer = bytearray(COPY_BYTES)
            of_layers = self._entries_of_layers(plan)
            owned = {entry.name for entries in of_layers.values() for entry in entries}
            lost = [n for n in plan.entries if n not in owned and n not in self.packed.checkpoint.tensors]
            if lost:
                raise PackedError(
                    f"{self.packed.path}: expected every tensor that {SOURCE_FILES} lists, got none of "
                    f"{shorten(lost)}. Repack the source again."
                )
            for name in plan.entries:
                if name not in owned:
                    for piece in read_tensor(
                        self.packed.checkpoint, self.packed.checkpoint.tensors[name], buffer
                    ):
                        writer.append(name, piece)
                        self.progress.advance(len(piece), plan.name)
            for layer in self.packed.manifest.layers:
                self._write_experts(writer, layer, of_layers.get(layer.module, []))
            self.progress.advance(len(plan.header), plan.name)
            record = writer.finish()
        self.journal.finish(plan.name, {"file": record.as_json()})

    def _entries_of_layers(self, plan: FilePlan) -> dict[str, list[TensorEntry]]:
        found: dict[str, list[TensorEntry]] = {}
        for entry in plan.entries.values():
            for layer in self.packed.manifest.layers:
                if entry.name.startswith(f"{layer.module}."):
                    found.setdefault(layer.module, []).append(entry)
        return found

    def _write_experts(self, writer: TensorWriter, layer: LayerRecord, entries: list[TensorEntry]) -> None:
        """All experts, one after another: a tensor that holds them all grows expert by expert."""
        of_expert, strange = parts_of(layer, entries)
        if strange:
            raise PackedError(
                f"{self.packed.path / SOURCE_FILES}: expected below {layer.module} the tensors of its "
                f"experts alone, got {shorten([entry.name for entry in strange])}. Repack the source again."
            )
        experts = self.packed.experts(layer)
        for restored in restored_blocks(experts, layer, of_expert, block_bytes=self.block_bytes):
            for expert in restored.block:
                for part in of_expert[expert]:
                    tensor = restored.tensor(part)
                    writer.append(part.entry.name, tensor_bytes(tensor))
                    self.progress.advance(tensor.nbytes, writer.plan.name)


def _identity(packed: PackedCheckpoint) -> dict[str, Any]:
    """What has to be the same for a run to be resumed."""
    manifest = digest(packed.manifest.as_bytes())
    return {"purpose": "unpack", "version": VERSION, "manifest": manifest}
