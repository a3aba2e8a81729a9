"""What an earlier run finished -> what of it this run would make alike: nothing is kept on trust.

A file is kept where it is whole, by the hash of each of its bytes, and where the source is what it was made
from: by its stamps, or where they differ (a source that was copied, fetched again, or changed) by its bytes.
Every other file is made again.
"""

import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from ..errors import CheckpointError
from ..progress import NoProgress, Progress
from ..tensor_file import TensorFile
from .compare import file_digest, layer_problems
from .durable import COPY_BYTES, digest
from .integrity import hash_problems, header_problems
from .make_files import FileMaker, FileTask
from .reader import OneFile, packed_experts
from .records import PlainFileRecord, TensorFileRecord
from .repack_plan import LayerPlan
from .rest_files import read_tensor
from .tensor_writer import FilePlan


def kept(maker: FileMaker, task: FileTask, record: dict[str, Any]) -> Callable[[], dict[str, Any] | None]:
    """A look at one file: the record that it has from now on, or None where it is to be made again."""

    def look() -> dict[str, Any] | None:
        file = file_record(task.name, record)
        dead = record.get("dead_projections", None if task.is_layer else [])
        if file is None or not isinstance(dead, list) or not all(isinstance(name, str) for name in dead):
            return None
        earlier = _Earlier(maker=maker, task=task, file=file, dead_projections=tuple(dead))
        if not earlier.is_planned() or not is_whole(maker.journal.destination, file, maker.progress):
            return None
        stamps = maker.stamps(task.sources)
        if record.get("stamps") == stamps:
            return record
        if not earlier.is_of_this_source():
            return None
        seen = record | {"stamps": stamps}
        maker.journal.note(task.name, seen)
        return seen

    return look


def file_record(name: str, record: dict[str, Any]) -> TensorFileRecord | PlainFileRecord | None:
    """What a journal's record says of file `name`; None where it is torn or says something else."""
    try:
        content = record["file"]
        kind = TensorFileRecord if "tensors" in content else PlainFileRecord
        found: TensorFileRecord | PlainFileRecord = kind.from_json(content)
    except (KeyError, TypeError, ValueError, AttributeError):
        return None
    return found if found.name == name else None


def is_whole(folder: Path, record: TensorFileRecord | PlainFileRecord, progress: Progress) -> bool:
    """Whether a file is there with all the bytes that were recorded of it."""
    place = folder / record.name
    try:
        found = place.lstat()
        if not stat.S_ISREG(found.st_mode) or found.st_size != record.size_bytes:
            return False
        if isinstance(record, TensorFileRecord) and any(header_problems(folder, record)):
            return False
        return not any(hash_problems(folder, record, progress))
    except (OSError, CheckpointError):
        return False  # what cannot be read is made again


@dataclass(frozen=True, slots=True, kw_only=True)
class _Earlier:
    """A finished file of an earlier run, beside what this run would make."""

    maker: FileMaker
    task: FileTask
    file: TensorFileRecord | PlainFileRecord
    dead_projections: tuple[str, ...]

    def is_planned(self) -> bool:
        """Whether it is a file of the kind, and of a safetensors file with the header, that is planned."""
        plan = self.task.plan.file if isinstance(self.task.plan, LayerPlan) else self.task.plan
        if isinstance(plan, FilePlan):
            return (
                isinstance(self.file, TensorFileRecord)
                and self.file.header_xxh3_128 == digest(plan.header)
                and [tensor.name for tensor in self.file.tensors] == list(plan.entries)
            )
        content = self.maker.plan.contents.get(self.task.name)
        return isinstance(self.file, PlainFileRecord) and (
            self.file.carried if content is None else self.file.xxh3_128 == digest(content)
        )

    def is_of_this_source(self) -> bool:
        """Whether the source has the bytes that the file was made from, whatever its stamps are."""
        plan = self.task.plan
        if isinstance(plan, LayerPlan):
            return self._is_of_this_layer(plan)
        if isinstance(self.file, TensorFileRecord):
            return all(tensor.xxh3_128 == self._source_digest(tensor.name) for tensor in self.file.tensors)
        return file_digest(self.maker.checkpoint.path / self.task.name) == self.file.xxh3_128

    def _is_of_this_layer(self, plan: LayerPlan) -> bool:
        layer = plan.record(self.dead_projections)
        with TensorFile(self.maker.journal.destination / self.task.name, name=self.task.name) as file:
            problems = layer_problems(
                packed_experts(OneFile(file), layer),
                self.maker.checkpoint,
                layer,
                NoProgress(),
                block_bytes=self.maker.block_bytes,
            )
            return next(problems, None) is None

    def _source_digest(self, name: str) -> str:
        checkpoint, hashed = self.maker.checkpoint, xxhash.xxh3_128()
        for piece in read_tensor(checkpoint, checkpoint.tensors[name], bytearray(COPY_BYTES)):
            hashed.update(piece)
        return str(hashed.hexdigest())
