"""The order of a repack.

Rank 0 opens it, all ranks look at what is finished and make the rest, rank 0 writes the manifest. Each step
is taken by all ranks together, so that all end with the error of one.
"""

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from .checkpoint import shorten
from .errors import CheckpointError
from .packed.already import already_packed
from .packed.companions import write_content
from .packed.durable import comes_true, fsync_directory, read_regular, system_errors
from .packed.journal import Journal
from .packed.make_files import FileMaker, FileTask, Records, layer_records, manifest_of
from .packed.manifest import Manifest
from .packed.names import MANIFEST
from .packed.repack_plan import refuse_change, refuse_new_files, source_stamps
from .packed.resume import kept
from .progress import NoProgress
from .ranks import Ranks
from .workers import SharedProgress, run_all


@dataclass(frozen=True, slots=True, kw_only=True)
class RepackRun:
    """One repack; `write` may be called once."""

    maker: FileMaker
    ranks: Ranks
    workers: int
    progress: SharedProgress

    @property
    def journal(self) -> Journal:
        """Of the destination."""
        return self.maker.journal

    def write(self) -> tuple[Manifest, int]:
        """Every file that is not finished yet, then the manifest; how many an earlier run had finished."""
        with ExitStack() as stack:
            stack.callback(self.journal.release)
            recorded = self._open()
            if recorded is None:
                manifest = self.ranks.together(self._already_made)[0]
                if manifest is None:
                    raise RuntimeError("rank 0 gives the manifest")
                return manifest, len(manifest.file_names)
            with system_errors(f"{self.maker.checkpoint.path}: looking at its files"):
                tasks = self.maker.tasks()
            finished = self._keep(tasks, recorded)
            records = finished | self._make(tasks, finished)
            allowed = self.maker.allow_dead_experts
            manifest = manifest_of(self.maker.plan, records, allow_dead_experts=allowed)
            self.ranks.together(self._refuse_changed_source)
            self.ranks.together(self._let_go)
            self.ranks.together(lambda: self._publish(manifest))
            return manifest, len(finished)

    def _open(self) -> Records | None:
        """What an earlier run says that it finished, as rank 0 sees it; None where it finished all."""

        def first() -> tuple[str, Records | None]:
            if not self.ranks.is_first:
                return "", None
            self.journal.open()
            if self.journal.completed:
                return "", None
            names = [task.name for task in self.maker.tasks()]
            self.journal.forget_others({MANIFEST, *names})
            found = {name: done for name in names if (done := self.journal.finished(name)) is not None}
            return self.journal.run_id, found

        run_id, recorded = self.ranks.together(first)[0]

        def others() -> None:
            if not self.ranks.is_first:
                self.journal.join(run_id)

        if recorded is not None:
            self.ranks.together(others)
        return recorded

    def _already_made(self) -> Manifest | None:
        if not self.ranks.is_first:
            return None
        manifest = already_packed(self.maker, self.progress, workers=self.workers)
        self.journal.complete()
        return manifest

    def _keep(self, tasks: list[FileTask], recorded: Records) -> Records:
        """The files that need not be made again, each looked at by one rank."""

        def share() -> Records:
            mine = self.ranks.share([task for task in tasks if task.name in recorded])
            to_make = self.ranks.share([task for task in tasks if task.name not in recorded])
            self.progress.start(sum(task.size_bytes for task in (*mine, *to_make)))
            looks = [kept(self.maker, task, recorded[task.name]) for task in mine]
            found = run_all(looks, self.workers, self.progress)
            return {task.name: now for task, now in zip(mine, found, strict=True) if now is not None}

        together = {name: record for part in self.ranks.together(share) for name, record in part.items()}
        finished = {task.name: together[task.name] for task in tasks if task.name in together}
        self.ranks.together(lambda: self._withdraw(complete=len(finished) == len(tasks)))
        return finished

    def _withdraw(self, *, complete: bool) -> None:
        """No manifest beside files that are made again: a directory with one looks finished."""
        place = self.journal.destination / MANIFEST
        if self.ranks.is_first and not complete:
            with system_errors(f"{place}: removing the manifest of files that are made again"):
                place.unlink(missing_ok=True)
                fsync_directory(self.journal.destination)

    def _make(self, tasks: list[FileTask], finished: Records) -> Records:
        """The files that are not finished, this rank's by its workers; the records of all ranks."""
        allowed = self.maker.allow_dead_experts

        def share() -> Records:
            layer_records(self.maker.plan, finished, allow_dead_experts=allowed)
            mine = self.ranks.share([task for task in tasks if task.name not in finished])
            looked_at = self.ranks.share([task for task in tasks if task.name in finished])
            self.progress.start(sum(task.size_bytes for task in (*looked_at, *mine)))
            made: Records = {}
            for batch in ([t for t in mine if t.is_layer], [t for t in mine if not t.is_layer]):
                records = run_all([task.make for task in batch], self.workers, self.progress)
                made |= {task.name: record for task, record in zip(batch, records, strict=True)}
            return made

        return {name: record for part in self.ranks.together(share) for name, record in part.items()}

    def _refuse_changed_source(self) -> None:
        checkpoint, plan = self.maker.checkpoint, self.maker.plan
        refuse_change(checkpoint, plan.stamps, source_stamps(checkpoint, plan.companions))
        refuse_new_files(checkpoint, plan.companions)

    def _let_go(self) -> None:
        if not self.ranks.is_first:
            self.journal.release()

    def _publish(self, manifest: Manifest) -> None:
        """The manifest, and the end of the run."""
        if not self.ranks.is_first:
            return
        self._refuse_missing_files(manifest)
        content = manifest.as_bytes()
        if not self._is_there(content):
            write_content(self.journal, MANIFEST, content, NoProgress())
            self.journal.finish(MANIFEST, {"file": {"name": MANIFEST, "size_bytes": len(content)}})
        self.journal.complete()

    def _is_there(self, manifest: bytes) -> bool:
        try:
            return read_regular(self.journal.destination / MANIFEST) == manifest
        except OSError:
            return False

    def _refuse_missing_files(self, manifest: Manifest) -> None:
        """Every file must be where this process sees it, whole."""
        folder, sizes = self.journal.destination, {file.name: file.size_bytes for file in manifest.files}

        def missing() -> list[str]:
            return [name for name, size_bytes in sizes.items() if not _has_size(folder / name, size_bytes)]

        if missing() and (self.ranks.size == 1 or not comes_true(lambda: not missing())):
            raise CheckpointError(
                f"{folder}: expected all files of the run, whole, before the manifest, got no "
                f"{shorten(missing())} of their size. Give all {self.ranks.size} ranks one directory that "
                "all of them see, and run it again."
            )


def _has_size(place: Path, size_bytes: int) -> bool:
    return place.is_file() and place.stat().st_size == size_bytes
