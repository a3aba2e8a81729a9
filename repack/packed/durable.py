"""Files that are whole or absent: allocated, written under a partial name, synced, renamed."""

import errno
import json
import os
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import xxhash

from ..errors import PackedError
from ..tensor_file import file_kind

COPY_BYTES = 8 << 20
"""Bytes of the buffer through which files are copied and hashed."""

LONGEST_DELAY_S = 70.0
"""Until one machine sees what another has written: NFS may show a folder as it was a minute ago."""

REMEDIES = {
    errno.ENOSPC: "Free space and run it again: it goes on where it stopped.",
    errno.EDQUOT: "Free space within the quota and run it again: it goes on where it stopped.",
    errno.EFBIG: "Raise the limit of a file's size and run it again: it goes on where it stopped.",
    errno.EACCES: "Make the directory writable for this user, or choose another one.",
    errno.EPERM: "Make the directory writable for this user, or choose another one.",
    errno.EROFS: "Choose a destination on a writable file system.",
}


@contextmanager
def system_errors(what: str) -> Iterator[None]:
    """An OSError becomes a PackedError with what was done, the system's words, its errno and a remedy."""
    try:
        yield
    except OSError as error:
        code = errno.errorcode.get(error.errno or 0, "no errno")
        remedy = REMEDIES.get(error.errno or 0, "Mend that and run it again.")
        text = error.strerror or str(error)
        raise PackedError(f"{what} failed: {text} ({code}, errno {error.errno}). {remedy}") from error


class PartialFile:
    """A file of known size under a partial name; the room for all of it is allocated at once.

    Raises:
        PackedError: no room or no permission, with the errno.
    """

    def __init__(self, path: Path, size_bytes: int) -> None:
        self.path = path
        self.size_bytes = size_bytes
        with system_errors(f"{path}: allocating {size_bytes} bytes"):
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
            try:
                if size_bytes:
                    os.posix_fallocate(self._fd, 0, size_bytes)
            except BaseException:
                self.abandon()
                raise

    def write(self, offset: int, data: memoryview) -> None:
        """All of `data` at `offset`."""
        done = 0
        with system_errors(f"{self.path}: writing {len(data)} bytes at {offset}"):
            while done < len(data):
                done += os.pwrite(self._fd, data[done:], offset + done)

    def copy(self, source: int, source_offset: int, offset: int, count: int) -> int:
        """Bytes of an open file to `offset`, without passing through this process: at most `count` of them.

        Where the file system can it shares the blocks (reflink). 0 where it copies nothing in this way, be it
        that it cannot or that something is wrong: reading and writing then tell which, and where.
        """
        try:
            return os.copy_file_range(source, self._fd, count, source_offset, offset)
        except OSError:
            return 0

    def read(self, offset: int, buffer: memoryview) -> None:
        """What was written, to be hashed."""
        done = 0
        with system_errors(f"{self.path}: reading {len(buffer)} bytes at {offset}"):
            while done < len(buffer):
                count = os.preadv(self._fd, [buffer[done:]], offset + done)
                if count == 0:
                    raise OSError(errno.EIO, "the file ends too early")
                done += count

    def sync(self) -> None:
        """Everything on the disk, the file closed."""
        with system_errors(f"{self.path}: syncing"):
            os.fsync(self._fd)
            os.close(self._fd)
        self._fd = -1

    def abandon(self) -> None:
        """Close and remove the file, unless it was synced. The error that led here is the one to be told."""
        if self._fd >= 0:
            descriptor, self._fd = self._fd, -1
            with suppress(OSError):
                os.close(descriptor)
            with suppress(OSError):
                self.path.unlink(missing_ok=True)


def publish(partial: Path, final: Path, root: Path) -> None:
    """Rename a synced file to its final name below `root`, and make the name durable."""
    with system_errors(f"{final}: renaming {partial.name}"):
        final.parent.mkdir(parents=True, exist_ok=True)
        os.rename(partial, final)
        folder = final.parent
        fsync_directory(folder)
        while folder != root:
            folder = folder.parent
            fsync_directory(folder)


def write_whole(partial: Path, final: Path, content: bytes) -> None:
    """A small file, whole or absent."""
    file = PartialFile(partial, len(content))
    try:
        file.write(0, memoryview(content))
        file.sync()
    finally:
        file.abandon()
    publish(partial, final, final.parent)


def fsync_directory(path: Path) -> None:
    """The names in a directory on the disk."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def digest(data: bytes | bytearray | memoryview) -> str:
    """xxh3-128 as hexadecimal text."""
    return str(xxhash.xxh3_128_hexdigest(data))


def canonical_json(content: Any) -> bytes:
    """One spelling of JSON content, for hashes."""
    return json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def comes_true(condition: Callable[[], bool]) -> bool:
    """Whether a condition on what other machines write holds, at the latest in `LONGEST_DELAY_S`."""
    deadline = time.monotonic() + LONGEST_DELAY_S
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.5)
    return True


def read_regular(path: Path) -> bytes:
    """The bytes of a regular file; OSError for anything else, a pipe too, which would be waited for."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    mode = os.fstat(fd).st_mode
    if not stat.S_ISREG(mode):
        os.close(fd)
        raise OSError(errno.EINVAL, f"expected a regular file, got {file_kind(mode)}", str(path))
    with open(fd, "rb") as file:
        return file.read()


def read_pieces(path: Path, buffer: bytearray) -> Iterator[memoryview]:
    """The bytes of a file in order, in pieces of a reused buffer; of a pipe none, instead of waiting."""

    def opener(name: str, flags: int) -> int:
        return os.open(name, flags | os.O_NONBLOCK)

    with system_errors(f"{path}: reading"), open(path, "rb", buffering=0, opener=opener) as file:
        while count := file.readinto(buffer):
            yield memoryview(buffer)[:count]
