"""The folder of a run in progress: its lock, its partial files and a record of every finished file.

    destination/.marlin_moe/lock                  held (flock) while a run lives
    destination/.marlin_moe/lock-<rank>           the same by every other rank of a run of several
    destination/.marlin_moe/run.json              what is made of which source; a run of another is refused
    destination/.marlin_moe/<name>.partial        being written
    destination/.marlin_moe/<name>.finished.json  record of a file that has its final name, or gets it now
    destination/.marlin_moe/complete.json         run.json once all is done; only the folder is left to remove

One record per file, so that several workers and ranks can add theirs. The folder goes when the run is
complete; what a killed run leaves is what the next one resumes from. Rank 0 opens the run and clears what
partial files it finds; it does so only when no rank of an earlier run is alive.
"""

import fcntl
import json
import os
import shutil
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

from ..errors import PackedError
from ..ranks import ALONE, Ranks
from .durable import fsync_directory, publish, system_errors, write_whole
from .names import MANIFEST, WORK_FOLDER

RUN = "run.json"
COMPLETE = "complete.json"
LOCK = "lock"
PARTIAL = ".partial"
FINISHED = ".finished.json"


class Journal:
    """One run that fills the directory `destination`; use it as a context manager.

    Args:
        destination: does not exist, is empty, or holds an interrupted run with the same `run`.
        run: what is made of what, as a JSON object.
        ranks: which process of those that share the run; the others enter after rank 0 has.

    Raises:
        PackedError: anything else is there, or another run holds the lock; nothing was changed.
    """

    def __init__(self, destination: Path, run: Mapping[str, Any], *, ranks: Ranks = ALONE) -> None:
        self.destination = destination
        self.folder = destination / WORK_FOLDER
        self.run = json.loads(json.dumps(run))
        self.resumed_files = 0
        self.completed = False
        """An earlier run finished everything and was stopped while it removed its folder."""
        self._ranks = ranks
        self._lock = -1
        self._made_destination = False

    def __enter__(self) -> "Journal":
        with system_errors(f"{self.destination}: opening the destination"):
            if not self._ranks.is_first:
                self._lock = self._take_lock(f"{LOCK}-{self._ranks.rank}")
                return self
            self._refuse_strangers()
            self._made_destination = not self.destination.exists()
            self.destination.mkdir(parents=True, exist_ok=True)
            self._lock = self._take_lock(LOCK)
            try:
                self._refuse_ranks_alive()
                self._open_run()
            except BaseException:
                self._release()
                raise
        return self

    def __exit__(self, *_: object) -> None:
        self._release()

    def partial(self, name: str) -> Path:
        """Where file `name` is written before it is finished."""
        return self.folder / f"{quote(name, safe='')}{PARTIAL}"

    def finished(self, name: str) -> dict[str, Any] | None:
        """The record of a file that an earlier run finished and that still has its size; else None."""
        try:
            record = json.loads(self._record(name).read_bytes())
            present = (self.destination / name).stat().st_size == record["file"]["size_bytes"]
        except (FileNotFoundError, ValueError):
            return None
        if present:
            self.resumed_files += 1
            return dict(record)
        return None

    def finish(self, name: str, record: Mapping[str, Any]) -> None:
        """The synced partial of `name` gets its record (`record["file"]`: its size), then its final name.

        In this order a file with its final name is never made again, whenever the run is killed.
        """
        text = json.dumps(record).encode()
        write_whole(self._record(name).with_suffix(PARTIAL), self._record(name), text)
        publish(self.partial(name), self.destination / name, self.destination)

    def complete(self) -> None:
        """Everything is finished: the folder goes."""
        with system_errors(f"{self.folder}: removing the finished run's folder"):
            if not self.completed:
                os.rename(self.folder / RUN, self.folder / COMPLETE)
                fsync_directory(self.folder)
            for path in self.folder.iterdir():
                if path.name not in (LOCK, COMPLETE):
                    path.unlink(missing_ok=True)  # a rank's lock: it may be letting go of it
            (self.folder / LOCK).unlink()
            (self.folder / COMPLETE).unlink()
            self.folder.rmdir()
        self._let_go()

    def _record(self, name: str) -> Path:
        return self.folder / f"{quote(name, safe='')}{FINISHED}"

    def _refuse_strangers(self) -> None:
        if self.destination.exists() and not self.destination.is_dir():
            raise PackedError(f"{self.destination}: expected a directory or nothing there, got a file.")
        if self.destination.is_dir() and not self.folder.is_dir():
            found = sorted(path.name for path in self.destination.iterdir())
            if MANIFEST in found:
                raise self._is_finished()
            if found:
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

    def _take_lock(self, name: str) -> int:
        """The lock's descriptor. A lock that its holder removed meanwhile is taken anew."""
        place = self.folder / name
        for _ in range(100):
            self.folder.mkdir(exist_ok=True)
            try:
                lock = os.open(place, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            except FileNotFoundError:
                continue
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.path.samestat(os.fstat(lock), os.stat(place)):
                    os.ftruncate(lock, 0)
                    os.write(lock, f"process {os.getpid()} on {socket.gethostname()}".encode())
                    held, lock = lock, -1
                    return held
            except BlockingIOError as error:
                holder = os.pread(lock, 200, 0).decode(errors="replace") or "another process"
                raise PackedError(
                    f"{place}: expected no other run on {self.destination}, got one: {holder}. "
                    "Wait for it, or stop it and run again: that resumes."
                ) from error
            except FileNotFoundError:
                continue
            finally:
                if lock >= 0:
                    os.close(lock)
        raise PackedError(f"{place}: expected to take the lock, but it keeps disappearing.")

    def _refuse_ranks_alive(self) -> None:
        """Raise where a rank of an earlier run still writes; the locks of dead ones go."""
        for place in sorted(self.folder.glob(f"{LOCK}-*")):
            os.close(self._take_lock(place.name))
            place.unlink()

    def _open_run(self) -> None:
        found = _read(self.folder / COMPLETE)
        self.completed = found is not None
        if found is None:
            found = _read(self.folder / RUN)
        if found is None:
            self._refuse_unknown()
        elif found != self.run and (self.completed or not self._fruitless()):
            keys = [key for key in {**found, **self.run} if found.get(key) != self.run.get(key)]
            raise PackedError(
                f"{self.destination}: expected an interrupted run of the same source, to resume it, got "
                f"one that differs in {', '.join(keys)}: the source is another one or was changed since. "
                f"Remove {self.destination} to start anew."
            )
        for path in self.folder.glob(f"*{PARTIAL}"):
            path.unlink()
        if found != self.run:
            text = json.dumps(self.run).encode()
            write_whole(self.folder / f"{RUN}{PARTIAL}", self.folder / RUN, text)

    def _refuse_unknown(self) -> None:
        """Without a word on whose run this is, the directory has to be empty."""
        others = sorted(path.name for path in self.destination.iterdir() if path.name != WORK_FOLDER)
        if not others:
            return
        if [path.name for path in self.folder.iterdir()] == [LOCK]:
            shutil.rmtree(self.folder)
        if MANIFEST in others:  # the run that made it was killed while it removed its folder
            raise self._is_finished()
        raise PackedError(
            f"{self.destination}: expected an empty directory or an interrupted run to resume, got "
            f"{', '.join(others[:4])} and no {WORK_FOLDER}/{RUN}. Choose another destination."
        )

    def _fruitless(self) -> bool:
        """Nothing was finished, and nothing else lies in the destination."""
        only = [path.name for path in self.destination.iterdir()] == [WORK_FOLDER]
        return only and not any(self.folder.glob(f"*{FINISHED}"))

    def _release(self) -> None:
        """Let go of the lock; one that finished nothing leaves nothing, unless other ranks may write."""
        if self._lock < 0:
            return
        try:
            if self._ranks.size == 1 and self.folder.is_dir() and self._fruitless():
                shutil.rmtree(self.folder)
                if self._made_destination:
                    self.destination.rmdir()
        finally:
            self._let_go()

    def _let_go(self) -> None:
        os.close(self._lock)
        self._lock = -1


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
        content = json.loads(place.read_bytes())
    except (FileNotFoundError, ValueError):
        return None
    return content if isinstance(content, dict) else None
