"""A source checkpoint -> a packed one, streamed, resumable, whole or absent: `repack_checkpoint`."""

import time
import warnings
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from ..kernels.device import usable_device
from .blocks import BLOCK_BYTES, STREAM_BYTES
from .checkpoint import Checkpoint, shorten
from .errors import CheckpointError, MarlinMoEWarning
from .model_path import model_path
from .native.path import native_path
from .packed.companions import write_content
from .packed.durable import canonical_json, digest, system_errors
from .packed.journal import Journal, refuse_nested
from .packed.make_files import FileMaker, Records, layer_records, manifest_of
from .packed.manifest import Manifest
from .packed.names import MANIFEST, VERSION
from .packed.repack_plan import RepackPlan, plan_repack, source_mtimes
from .progress import NoProgress, Progress
from .ranks import ALONE, Ranks
from .workers import SharedProgress, run_all, worker_count


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
        workers, ranks: files made at once by each process; processes.
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
    workers: int
    ranks: int
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
    workers: int | None = None,
    ranks: Ranks = ALONE,
    block_bytes: int | None = None,
    progress: Progress | None = None,
) -> RepackReport:
    """Write the packed checkpoint of a source: experts in the Marlin layout, everything else unchanged.

    Memory stays at the blocks of experts in flight, whatever the size of a layer. Files get their names when
    they are complete, the manifest last; a stopped run resumes when it is called again and redoes no finished
    file. The bytes do not depend on device, workers or ranks.

    Args:
        src: a source checkpoint, which is only read: a directory, or `org/model` on the Hugging Face Hub.
        dst: a directory that does not exist, is empty, or holds an interrupted run of the same source.
        device: where the stages run; the bytes are the same everywhere.
        allow_dead_experts: accept a projection whose scales are all zero.
        follow_links: follow links that lead out of the source's directory.
        workers: files made at once, by threads; by default one a core, on a GPU one.
        ranks: the processes that share the run (`ranks_from_environment`); each makes its share of the files.
        block_bytes: source bytes that the blocks of experts in flight hold, all workers together, and at
            least one expert each; on a GPU also the pinned memory. By default 32 MiB, on a GPU 128.
        progress: follows the bytes that this process writes.

    Raises:
        MarlinMoEError: a source that cannot be loaded, a destination that is taken, a fault of the system
            with its errno. What is left never loads.
    """
    started = time.monotonic()
    source, destination = model_path(src), Path(dst)
    target = usable_device(device)
    budget = block_bytes or (STREAM_BYTES if target.type == "cpu" else BLOCK_BYTES)
    shared = SharedProgress(progress or NoProgress())
    refuse_nested(source, destination)
    with Checkpoint(source, follow_links=follow_links) as checkpoint:
        plan = _plan(checkpoint, ranks, device=target, follow_links=follow_links)
        largest = max(layer.file.size_bytes // layer.facts.num_experts for layer in plan.layers)
        count = worker_count(workers, target, expert_bytes=largest)
        maker = FileMaker(
            checkpoint=checkpoint,
            plan=plan,
            journal=Journal(destination, _identity(plan), ranks=ranks),
            progress=shared,
            allow_dead_experts=allow_dead_experts,
            block_bytes=budget // count,
            device=target,
        )
        manifest, resumed = _Run(maker=maker, ranks=ranks, workers=count, progress=shared).write()
        said = _left_out_warning(source, (*checkpoint.left_out, *plan.companions.left_out))
        return RepackReport(
            source=str(source),
            destination=str(destination),
            seconds=time.monotonic() - started,
            source_bytes=sum(file.size_bytes for file in checkpoint.files.values()),
            packed_bytes=manifest.size_bytes + len(manifest.as_bytes()),
            layers=len(plan.layers),
            files=len(manifest.file_names),
            resumed_files=resumed,
            carried_tensors=sum(len(file.entries) for file in plan.rest),
            carried_files=plan.companions.names,
            left_out=tuple(sorted({*checkpoint.left_out, *plan.companions.left_out})),
            native_path=str(native_path(target)),
            workers=count,
            ranks=ranks.size,
            warnings=said,
        )


def _plan(checkpoint: Checkpoint, ranks: Ranks, *, device: torch.device, follow_links: bool) -> RepackPlan:
    """The plan, which all ranks must have alike."""
    made: list[RepackPlan] = []

    def step() -> str:
        made.append(plan_repack(checkpoint, device=device, follow_links=follow_links))
        return digest(canonical_json(_identity(made[0])))

    found = ranks.together(step)
    others = [str(rank) for rank, identity in enumerate(found) if identity != found[0]]
    if others:
        raise CheckpointError(
            f"{checkpoint.path}: expected all ranks to see the same source (names, sizes, headers, times of "
            f"change), got another one on rank {', '.join(others)} than on rank 0. Give all of them one "
            "directory."
        )
    return made[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """The order of a run: rank 0 opens it, all ranks make their share, rank 0 closes it."""

    maker: FileMaker
    ranks: Ranks
    workers: int
    progress: SharedProgress

    @property
    def journal(self) -> Journal:
        return self.maker.journal

    def write(self) -> tuple[Manifest, int]:
        """Every file that is not finished yet, then the manifest; how many an earlier run had finished."""
        with ExitStack() as stack:
            finished = self._open(stack)
            if finished is None:
                manifest = Manifest.read(self.journal.destination)
                self.ranks.together(self._complete)
                return manifest, len(manifest.file_names)
            records = finished | self._make(finished)
            allowed = self.maker.allow_dead_experts
            manifest = manifest_of(self.maker.plan, records, allow_dead_experts=allowed)
            self.ranks.together(self._refuse_changed_source)
            self.ranks.together(lambda: self._publish(manifest))
            return manifest, len(finished)

    def _open(self, stack: ExitStack) -> Records | None:
        """The files that an earlier run finished, as rank 0 sees them; None where it finished all."""

        def first() -> Records | None:
            if not self.ranks.is_first:
                return None
            stack.enter_context(self.journal)
            if self.journal.completed:
                return None
            names = [task.name for task in self.maker.tasks()]
            return {name: done for name in names if (done := self.journal.finished(name)) is not None}

        def others() -> None:
            if not self.ranks.is_first:
                stack.enter_context(self.journal)

        finished = self.ranks.together(first)[0]
        self.ranks.together(others)
        return finished

    def _make(self, finished: Records) -> Records:
        """The files that are not finished, this rank's by its workers; the records of all ranks."""
        allowed = self.maker.allow_dead_experts

        def share() -> Records:
            layer_records(self.maker.plan, finished, allow_dead_experts=allowed)
            with system_errors(f"{self.maker.checkpoint.path}: looking at its files"):
                tasks = [task for task in self.maker.tasks() if task.name not in finished]
            mine = self.ranks.share(tasks)
            earlier = {name: record["file"]["size_bytes"] for name, record in finished.items()}
            self.progress.start(sum(earlier.values()) + sum(task.size_bytes for task in mine))
            for name, size_bytes in earlier.items():
                self.progress.advance(size_bytes, name)
            made: Records = {}
            for batch in ([t for t in mine if t.is_layer], [t for t in mine if not t.is_layer]):
                records = run_all([task.make for task in batch], self.workers, self.progress)
                made |= {task.name: record for task, record in zip(batch, records, strict=True)}
            return made

        return {name: record for part in self.ranks.together(share) for name, record in part.items()}

    def _refuse_changed_source(self) -> None:
        checkpoint, plan = self.maker.checkpoint, self.maker.plan
        with system_errors(f"{checkpoint.path}: looking at its files again"):
            now = source_mtimes(checkpoint, plan.companions)
        changed = [name for name, mtime in plan.mtimes_ns.items() if now.get(name) != mtime]
        if changed:
            raise CheckpointError(
                f"{checkpoint.path}: expected a source that stays as it is while it is repacked, got "
                f"a change of {shorten(changed)}. Remove {self.journal.destination} and run it again."
            )

    def _publish(self, manifest: Manifest) -> None:
        if self.ranks.is_first:
            self._refuse_missing_files(manifest)
            if self.journal.finished(MANIFEST) is None:
                content = manifest.as_bytes()
                write_content(self.journal, MANIFEST, content, NoProgress())
                self.journal.finish(MANIFEST, {"file": {"name": MANIFEST, "size_bytes": len(content)}})
            self.journal.complete()

    def _refuse_missing_files(self, manifest: Manifest) -> None:
        """Every file must be where this process sees it: ranks may have written to another directory."""
        sizes = {file.name: file.size_bytes for file in manifest.tensor_files}
        sizes |= {file.name: file.size_bytes for file in manifest.plain_files}
        folder = self.journal.destination
        missing = [
            name
            for name, size_bytes in sizes.items()
            if not (folder / name).is_file() or (folder / name).stat().st_size != size_bytes
        ]
        if missing:
            raise CheckpointError(
                f"{folder}: expected all files of the run, whole, before the manifest, got no "
                f"{shorten(missing)} of their size. Give all {self.ranks.size} ranks one directory that all "
                "of them see, and run it again."
            )

    def _complete(self) -> None:
        if self.ranks.is_first:
            self.journal.complete()


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
