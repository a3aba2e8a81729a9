"""The folder of a run in progress: its lock, its partial files and a record of every finished file.

    destination/.marlin_moe/lock                  held (flock) while a run lives
    destination/.marlin_moe/lock-<rank>           the same by every other rank of a run of several
    destination/.marlin_moe/run.json              what is made of which source; a run of another is refused
    destination/.marlin_moe/<name>.partial        being written
    destination/.marlin_moe/<name>.finished.json  record of a file that has its final name, or gets it now
    destination/.marlin_moe/complete.json         run.json once all is done; only the folder is left to remove

One record per file, so that several workers and ranks can add theirs. The folder goes when the run is
complete; what a killed run leaves is what the next one resumes from. Rank 0 opens the run, gives it a random
name, which tells the other ranks that their destination is the same directory, and clears what partial files
it finds; it does so only when no rank of an earlier run is alive.
"""

import json
import os
import re
import uuid
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

from ..checkpoint import is_below
from ..errors import PackedError
from ..ranks import ALONE, Ranks
from .durable import comes_true, digest, fsync_directory, publish, read_regular, system_errors, write_whole
from .names import MANIFEST, RUN, WORK_FOLDER
from .run_lock import take_lock

COMPLETE = "complete.json"
LOCK = "lock"
PARTIAL = ".partial"
FINISHED = ".finished.json"
RANK_LOCK = re.compile(rf"{LOCK}-\d+")

LONGEST_NAME = 128
"""Of a file in the folder, before its ending; a longer one is cut and told from others by its hash."""


class Journal:
    """One run that fills the directory `destination`.

    As a context manager it is opened, and released at the end; of several ranks rank 0 calls `open`, then
    the others `join` it, and each calls `release`.

    Args:
        destination: does not exist, is empty, or holds an interrupted run with the same `run`.
        run: what is made of what, as a JSON object.
        ranks: which process of those that share the run.
        last_file: the name of a file that only a finished run leaves, where there is one.

    Raises:
        PackedError: anything else is there, or another run holds the lock; nothing was changed.
    """

    def __init__(
        self, destination: Path, run: Mapping[str, Any], *, ranks: Ranks = ALONE, last_file: str | None = None
    ) -> None:
        self.destination = destination
        self.folder = destination / WORK_FOLDER
        self.run = json.loads(json.dumps(run))
        self.run_id = uuid.uuid4().hex
        self.completed = False
        """An earlier run finished everything."""
        self._ranks, self._last_file = ranks, last_file
        self._lock = -1
        self._made_destination = False

    def open(self) -> None:
        """Begin the run or resume it; where an earlier one is `completed`, nothing is left to do."""
        with system_errors(f"{self.destination}: opening the destination"):
            self._refuse_strangers()
            if self.completed:
                return
            self._made_destination = not self.destination.exists()
            self.destination.mkdir(parents=True, exist_ok=True)
            self._lock = take_lock(self.folder / LOCK, self.destination)
            try:
                self._refuse_ranks_alive()
                self._open_run()
            except BaseException:
                self.release()
                raise

    def join(self, run_id: str) -> None:
        """Take part in the run that rank 0 has opened under this name; before that nothing is written.

        Raises:
            PackedError: it is not here, so this rank's destination is another directory.
        """
        with system_errors(f"{self.destination}: joining the run"):
            if not comes_true(lambda: (_read(self.folder / RUN) or {}).get("id") == run_id):
                found = "none" if _read(self.folder / RUN) is None else "another one"
                raise PackedError(
                    f"{self.destination}: expected the run that rank 0 has begun there, got {found} on rank "
                    f"{self._ranks.rank}: the two see different directories. Give all {self._ranks.size} "
                    "ranks one directory that all of them see."
                )
            self._lock = take_lock(self.folder / f"{LOCK}-{self._ranks.rank}", self.destination)

    def __enter__(self) -> "Journal":
        self.open()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def partial(self, name: str) -> Path:
        """Where file `name` is written before it is finished."""
        return self._place(name, PARTIAL)

    def finished(self, name: str) -> dict[str, Any] | None:
        """What an earlier run recorded of a file that it finished, or None; the file may be gone since."""
        with system_errors(f"{self.destination}: reading what is finished"):
            return _read(self._place(name, FINISHED))

    def forget_others(self, names: Collection[str]) -> None:
        """Remove what an earlier run finished and this one has not: files that left the source since."""
        with system_errors(f"{self.destination}: removing what is no longer in the source"):
            for place in sorted(self.folder.glob(f"*{FINISHED}")):
                record = _read(place)
                file = record.get("file") if record is not None else None
                name = file.get("name") if isinstance(file, dict) else None
                if not isinstance(name, str) or self._place(name, FINISHED) != place or name in names:
                    continue
                if is_below(name):
                    (self.destination / name).unlink(missing_ok=True)
                place.unlink()

    def finish(self, name: str, record: Mapping[str, Any]) -> None:
        """The synced partial of `name` gets its record, then its final name.

        In this order a file with its final name is never made again, whenever the run is killed.
        """
        self.note(name, record)
        publish(self.partial(name), self.destination / name, self.destination)

    def note(self, name: str, record: Mapping[str, Any]) -> None:
        """The record of a finished file, alone."""
        place = self._place(name, FINISHED)
        write_whole(place.with_suffix(PARTIAL), place, json.dumps(record).encode())

    def complete(self) -> None:
        """Everything is finished: the folder goes, after the other ranks have let go of their locks.

        Where it cannot go it does no harm: `complete.json` stays, or the last file of the run tells.
        """
        if self._lock < 0:
            return
        with system_errors(f"{self.folder}: marking the run as complete"):
            if not self.completed:
                os.rename(self.folder / RUN, self.folder / COMPLETE)
                fsync_directory(self.folder)
        with suppress(OSError):
            for path in self.folder.iterdir():
                if path.name not in (LOCK, COMPLETE):
                    path.unlink(missing_ok=True)
        self._let_go()  # NFS keeps an open file that is removed, and the folder with it
        with suppress(OSError):
            (self.folder / LOCK).unlink(missing_ok=True)
            if [path.name for path in self.folder.iterdir()] == [COMPLETE]:
                (self.folder / COMPLETE).unlink()
            self.folder.rmdir()

    def release(self) -> None:
        """Let go of the lock; one that finished nothing leaves nothing, unless other ranks may write.

        Only this run's own files are removed, the lock last: then another run may begin.
        """
        if self._lock < 0:
            return
        leave = False
        with suppress(OSError):  # the error that ended the run is the one to be told
            leave = self._ranks.size == 1 and self._is_fruitless()
            if leave:
                for place in (*self.folder.glob(f"*{PARTIAL}"), self.folder / RUN, self.folder / LOCK):
                    place.unlink(missing_ok=True)
        self._let_go()
        if leave:
            with suppress(OSError):
                self.folder.rmdir()
                if self._made_destination:
                    self.destination.rmdir()

    def _let_go(self) -> None:
        lock, self._lock = self._lock, -1
        with suppress(OSError):
            os.close(lock)

    def _place(self, name: str, ending: str) -> Path:
        quoted = quote(name, safe="")
        if len(quoted) > LONGEST_NAME:
            quoted = f"{quoted[: LONGEST_NAME // 2]}-{digest(name.encode())}"
        return self.folder / f"{quoted}{ending}"

    def _refuse_strangers(self) -> None:
        if self.destination.exists() and not self.destination.is_dir():
            raise PackedError(f"{self.destination}: expected a directory or nothing there, got a file.")
        if self.destination.is_dir() and not self.folder.is_dir():
            found = sorted(path.name for path in self.destination.iterdir())
            if self._last_file in found:
                self.completed = True
            elif MANIFEST in found:
                raise self._is_finished()
            elif found:
                raise PackedError(
                    f"{self.destination}: expected an empty directory, none, or an interrupted run to "
                    f"resume, got {len(found)} files or folders ({', '.join(found[:4])}). "
                    "Choose another destination."
                )

    def _is_finished(self) -> PackedError:
        return PackedError(
            f"{self.destination}: expected an empty directory or none, got a finished packed checkpoint. "
            "Remove it first, or choose another destination."
        )

    def _refuse_ranks_alive(self) -> None:
        """Raise where a rank of an earlier run still writes; the locks of dead ones go."""
        for place in sorted(path for path in self.folder.iterdir() if RANK_LOCK.fullmatch(path.name)):
            os.close(take_lock(place, self.destination))
            place.unlink()

    def _open_run(self) -> None:
        found = _read(self.folder / COMPLETE)
        self.completed = found is not None
        if found is None:
            found = _read(self.folder / RUN)
        if found is None:
            self._refuse_strange_folder()
            self._refuse_unknown()
        elif (run := found.get("run")) != self.run and (self.completed or not self._is_fruitless()):
            run = run if isinstance(run, dict) else {}
            keys = [key for key in {**run, **self.run} if run.get(key) != self.run.get(key)]
            raise PackedError(
                f"{self.destination}: expected an interrupted run of the same source, to resume it, got "
                f"one that differs in {', '.join(keys)}: the source is another one or was changed since. "
                f"Remove {self.destination} to start anew."
            )
        if self.completed:
            return
        for path in self.folder.glob(f"*{PARTIAL}"):
            path.unlink()
        text = json.dumps({"id": self.run_id, "run": self.run}).encode()
        write_whole(self.folder / f"{RUN}{PARTIAL}", self.folder / RUN, text)

    def _refuse_strange_folder(self) -> None:
        """A run that stopped before it said which it is has left locks and partial files, nothing else."""
        known = (LOCK, RUN, COMPLETE)
        strange = sorted(
            path.name
            for path in self.folder.iterdir()
            if path.name not in known
            and not RANK_LOCK.fullmatch(path.name)
            and not path.name.endswith((PARTIAL, FINISHED))
        )
        if strange or self.folder.is_symlink():
            raise PackedError(
                f"{self.folder}: expected the work folder of an interrupted run, got "
                f"{'a link' if self.folder.is_symlink() else ', '.join(strange[:4])}. Move it away."
            )

    def _refuse_unknown(self) -> None:
        """Without a word on whose run this is, the directory has to be empty, or finished."""
        others = sorted(path.name for path in self.destination.iterdir() if path.name != WORK_FOLDER)
        if not others:
            return
        if self._last_file in others:  # the run that made it was stopped while it removed its folder
            self.completed = True
            return
        if MANIFEST in others:
            raise self._is_finished()
        raise PackedError(
            f"{self.destination}: expected an empty directory or an interrupted run to resume, got "
            f"{', '.join(others[:4])} and no {WORK_FOLDER}/{RUN}. Choose another destination."
        )

    def _is_fruitless(self) -> bool:
        """Nothing was finished, and nothing else lies in the destination; or nothing lies in the folder."""
        if [path.name for path in self.folder.iterdir()] == [LOCK]:
            return True
        only = [path.name for path in self.destination.iterdir()] == [WORK_FOLDER]
        return only and not any(self.folder.glob(f"*{FINISHED}"))


def refuse_nested(source: Path, destination: Path) -> None:
    """Raise PackedError where one directory lies in the other."""
    src, dst = source.resolve(), destination.resolve()
    if dst == src or dst.is_relative_to(src) or src.is_relative_to(dst):
        raise PackedError(
            f"{destination}: expected a directory outside the source {source}, and the source outside of "
            f"it, got {dst}. Choose another destination."
        )


def _read(place: Path) -> dict[str, Any] | None:
    """A JSON object, or None where there is no whole one."""
    try:
        content = json.loads(read_regular(place))
    except (FileNotFoundError, NotADirectoryError, ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None
