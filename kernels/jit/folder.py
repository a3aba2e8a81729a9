"""A directory that only the user can write, checked every time it is opened: `open_private_folder`."""

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..errors import JitError

OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


@contextmanager
def open_private_folder(path: Path, *, below: tuple[str, ...], create: bool) -> Iterator[int | None]:
    """A descriptor of `path/below[0]/below[1]/...`; None where it does not exist and is not to be created.

    Each folder from `path` on is opened first and checked by its descriptor, so that nobody can swap it in
    between; a link counts as what it points to. New ones get mode 0700.

    Raises:
        JitError: a folder belongs to another user, or group or others may write to it.
        OSError: it cannot be created or opened.
    """
    if create:
        _make_parents(path)
    descriptor = _open(path, None, create=create)
    shown = path
    try:
        for name in below:
            if descriptor is None:
                break
            shown /= name
            inner = _open(shown, descriptor, create=create)
            os.close(descriptor)
            descriptor = inner
        yield descriptor
    finally:
        if descriptor is not None:
            os.close(descriptor)


def is_private(status: os.stat_result) -> bool:
    """Whether the file or folder is the user's own, and nobody else may write to it."""
    return status.st_uid == os.geteuid() and not status.st_mode & OTHERS_WRITE


def _open(path: Path, parent: int | None, *, create: bool) -> int | None:
    """Opens and checks one folder: `path` itself, or its last part below the descriptor `parent`."""
    name = str(path) if parent is None else path.name
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
    try:
        if create:
            try:
                os.mkdir(name, 0o700, dir_fd=parent)
            except FileExistsError:
                pass
            except OSError:
                # A read-only file system says so even where the folder exists; then reading it is enough.
                if not os.path.isdir(path):
                    raise
        descriptor = os.open(name, flags, dir_fd=parent)
    except FileNotFoundError:
        if create:
            raise
        return None
    try:
        status = os.fstat(descriptor)
        if not is_private(status):
            raise JitError(
                f"{path}: expected a folder that only user {os.geteuid()} can write, because kernels are "
                f"loaded from it, got owner {status.st_uid} and mode {stat.S_IMODE(status.st_mode):04o}. "
                "Run chmod go-w on it, or set MARLIN_MOE_CACHE to a folder of your own."
            )
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _make_parents(path: Path) -> None:
    for parent in reversed(path.parents):
        if not parent.is_dir():
            parent.mkdir(0o700, exist_ok=True)
