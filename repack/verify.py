"""Prove that a packed checkpoint is whole and, given its source, equal to it: `verify_checkpoint`."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from .blocks import STREAM_BYTES
from .checkpoint import Checkpoint
from .errors import PackedError
from .model_path import model_path
from .packed.compare import source_comparisons
from .packed.differences import Problem
from .packed.integrity import hash_problems, header_problems, layer_problems, size_problems, unlisted_files
from .packed.manifest import Manifest
from .packed.names import MANIFEST, is_packed
from .packed.reader import PackedCheckpoint
from .packed.records import PlainFileRecord, TensorFileRecord
from .progress import NoProgress, Progress
from .workers import SharedProgress, run_all, worker_count

MAX_PROBLEMS = 1000
"""A report lists at most as many problems and counts the rest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """What a verification found.

    Attributes:
        packed, source: directories; source is None where none was given.
        ok: nothing is wrong.
        problems: what is wrong, at most 1000 of them; `problem_count`: all.
        seconds: of this run.
        layers: MoE layers.
        files, tensors: whose hashes were compared.
        packed_bytes: of them.
        source_tensors, source_bytes: compared with the source, 0 without one.
        unlisted_files: files in the directory that the manifest does not name; they are no part of the
            checkpoint.
    """

    packed: str
    source: str | None
    ok: bool
    problems: tuple[Problem, ...]
    problem_count: int
    seconds: float
    layers: int
    files: int
    tensors: int
    packed_bytes: int
    source_tensors: int
    source_bytes: int
    unlisted_files: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def verify_checkpoint(
    packed: str | Path,
    src: str | Path | None = None,
    *,
    follow_links: bool = False,
    workers: int | None = None,
    block_bytes: int = STREAM_BYTES,
    progress: Progress | None = None,
) -> VerifyReport:
    """Whether a packed checkpoint is whole, and whether it is its source.

    Every size, header and hash is compared with the manifest. With `src` every packed expert is also
    inverted, block after block, to the tensors that the source must have, and compared with its bytes; so is
    everything else. The stages that made the packed tensors do not run.

    Args:
        packed: a packed checkpoint.
        src: its source. Both may be models on the Hugging Face Hub (`org/model`).
        follow_links: follow links that lead out of the source's directory.
        workers: files and layers compared at once, by threads; by default one a core.
        block_bytes: packed bytes that the blocks of experts in flight hold, all workers together, and at
            least one expert each.
        progress: follows the bytes read.

    Raises:
        PackedError: no packed checkpoint, an interrupted one, or one of another version.
        CheckpointError: `src` is no checkpoint, or a packed one (PackedError).
    """
    started = time.monotonic()
    path = model_path(packed)
    src = None if src is None else model_path(src)
    if not is_packed(path):
        raise PackedError(
            f"{path}: expected a packed checkpoint with {MANIFEST}, got none. Repack the source first."
        )
    if src is not None and is_packed(src):
        raise PackedError(
            f"{src}: expected the source checkpoint that {path} was packed from, got one that is packed "
            "itself. Name the source, or leave it out to check the hashes alone."
        )
    manifest = Manifest.read(path)
    source = None if src is None else Checkpoint(src, follow_links=follow_links)
    watcher = SharedProgress(progress or NoProgress())
    sizes = {file.name: file.size_bytes for file in manifest.tensor_files}
    largest = max((sizes.get(one.file, 0) // one.facts.num_experts for one in manifest.layers), default=0)
    count = worker_count(workers, torch.device("cpu"), expert_bytes=largest)
    source_bytes = 0 if source is None else sum(entry.nbytes for entry in source.tensors.values())
    watcher.start(manifest.size_bytes + source_bytes)
    try:
        problems, problem_count = _Verification(
            path=path,
            manifest=manifest,
            source=source,
            progress=watcher,
            workers=count,
            block_bytes=block_bytes // count,
        ).found()
    finally:
        if source is not None:
            source.close()
    return VerifyReport(
        packed=str(path),
        source=None if src is None else str(src),
        ok=not problem_count,
        problems=problems,
        problem_count=problem_count,
        seconds=time.monotonic() - started,
        layers=len(manifest.layers),
        files=len(manifest.file_names),
        tensors=sum(len(file.tensors) for file in manifest.tensor_files),
        packed_bytes=manifest.size_bytes,
        source_tensors=0 if source is None else len(source.tensors),
        source_bytes=source_bytes,
        unlisted_files=tuple(unlisted_files(path, manifest)),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Verification:
    """What is compared with what; files when hashed and layers when inverted side by side."""

    path: Path
    manifest: Manifest
    source: Checkpoint | None
    progress: SharedProgress
    workers: int
    block_bytes: int

    def found(self) -> tuple[tuple[Problem, ...], int]:
        """The first problems in the order of the manifest and the number of all.

        The source is compared only with files that have their sizes and headers.
        """
        broken: set[str] = set()
        parts = [_first(self._by_headers(broken))]
        files = [file for file in self.manifest.files if file.name not in broken]
        parts += self._side_by_side([partial(self._by_hash, file) for file in files])
        if self.source is not None and not broken:
            parts += self._by_source(self.source)
        problems = tuple(problem for part, _ in parts for problem in part)
        return problems[:MAX_PROBLEMS], sum(count for _, count in parts)

    def _side_by_side(
        self, tasks: Sequence[Callable[[], Iterable[Problem]]]
    ) -> list[tuple[tuple[Problem, ...], int]]:
        return run_all([partial(_first_of, task) for task in tasks], self.workers, self.progress)

    def _by_headers(self, broken: set[str]) -> Iterator[Problem]:
        path, manifest = self.path, self.manifest
        for name, message in size_problems(path, manifest):
            broken.add(name)
            yield Problem(name=name, message=message)
        for name in unlisted_files(path, manifest):
            if name.endswith(".safetensors"):
                yield Problem(
                    name=name, message=f"{path / name}: expected no such file, because {MANIFEST} names none."
                )
        for record in manifest.tensor_files:
            if record.name not in broken:
                for name, message in header_problems(path, record):
                    broken.add(name)
                    yield Problem(name=name, message=message)
        for name, message in layer_problems(path, manifest):
            broken.add(name)
            yield Problem(name=name, message=message)

    def _by_hash(self, file: TensorFileRecord | PlainFileRecord) -> Iterator[Problem]:
        for name, message in hash_problems(self.path, file, self.progress):
            yield Problem(name=name, message=message)

    def _by_source(self, source: Checkpoint) -> list[tuple[tuple[Problem, ...], int]]:
        try:
            with PackedCheckpoint(self.path) as opened:
                tasks = source_comparisons(opened, source, self.progress, block_bytes=self.block_bytes)
                return self._side_by_side(tasks)
        except PackedError as error:
            return [((Problem(name=MANIFEST, message=str(error)),), 1)]


def _first_of(task: Callable[[], Iterable[Problem]]) -> tuple[tuple[Problem, ...], int]:
    """The same of what a task finds."""
    return _first(task())


def _first(problems: Iterable[Problem]) -> tuple[tuple[Problem, ...], int]:
    """The first problems and the number of all."""
    kept: list[Problem] = []
    count = 0
    for problem in problems:
        count += 1
        if len(kept) < MAX_PROBLEMS:
            kept.append(problem)
    return tuple(kept), count
