"""The state of the cubin cache, looked at without leaving a trace: `examine_cache`, `CacheState`."""

import os
import re
import secrets
from dataclasses import dataclass
from pathlib import Path

from ..errors import JitError
from .cache import FOLDERS, cache_folder, cache_root
from .folder import open_private_folder

KEY = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheState:
    """The cubin cache of this process.

    Fields:
        path: the folder of the entries, whether it exists or not; None where the variables name none.
        entries: cubins in it.
        nbytes: bytes of them.
        reason: why none can be put there, or None; kernels are then compiled anew in every process.
        problem: why no kernel can be had at all, or None: a path or a folder that is refused.
    """

    path: str | None
    entries: int = 0
    nbytes: int = 0
    reason: str | None = None
    problem: str | None = None


def examine_cache() -> CacheState:
    """Counts what the cache holds and tries whether more could be put there; makes no cache."""
    path = None
    try:
        path = str(cache_folder())
        with open_private_folder(cache_root(), below=FOLDERS, create=False) as folder:
            sizes = [] if folder is None else _entry_sizes(folder)
    except JitError as error:
        return CacheState(path=path, problem=str(error))
    except OSError as error:
        return CacheState(path=path, reason=str(error))
    return CacheState(path=path, entries=len(sizes), nbytes=sum(sizes), reason=_why_not_written(Path(path)))


def _entry_sizes(folder: int) -> list[int]:
    with os.scandir(folder) as found:
        return [
            entry.stat(follow_symlinks=False).st_size
            for entry in found
            if KEY.fullmatch(entry.name) and entry.is_file(follow_symlinks=False)
        ]


def _why_not_written(path: Path) -> str | None:
    """Tries it where the path ends: a folder of no name, made and removed."""
    last = next(place for place in (path, *path.parents) if os.path.lexists(place))
    trial = last / f".marlin-moe-{os.getpid()}-{secrets.token_hex(8)}"
    try:
        trial.mkdir(0o700)
        trial.rmdir()
    except OSError as error:
        return f"{last}: {error.strerror}"
    return None
