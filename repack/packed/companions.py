"""The other files of a checkpoint directory: tokenizer, chat template, generation config, the model's code.

They are copied byte for byte, so that the packed directory stands alone. Weights in other formats, hidden
files, pipes and devices are left out: nothing is unpickled, and what a packed checkpoint does not hold it
does not pretend to.
"""

import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import xxhash

from ..checkpoint import CONFIG, INDEX, Checkpoint, inside, shorten
from ..errors import PackedError
from ..progress import Progress
from .durable import COPY_BYTES, PartialFile, digest, system_errors
from .journal import Journal
from .names import FORMAT, RESERVED
from .records import PlainFileRecord

OTHER_WEIGHTS = (
    ".safetensors",
    ".bin",
    ".pt",
    ".pth",
    ".ckpt",
    ".pkl",
    ".pickle",
    ".msgpack",
    ".h5",
    ".gguf",
    ".onnx",
)
OTHER_INDEXES = (".bin.index.json", ".safetensors.index.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class Companions:
    """Names of files to copy (below the directory, `/` between folders), and of those left out."""

    names: tuple[str, ...]
    left_out: tuple[str, ...]


def find_companions(checkpoint: Checkpoint, *, follow_links: bool = False) -> Companions:
    """What to copy from an open checkpoint's directory.

    Raises:
        CheckpointError: a link that leads out of it, unless `follow_links`.
        PackedError: a file with a name that the packed checkpoint needs itself, or that is not UTF-8; a link
            to nothing; a folder that cannot be listed.
    """
    names: list[str] = []
    left_out: list[str] = []
    for folder, folders, files in os.walk(checkpoint.path, onerror=_refuse_folder):
        base = Path(folder).relative_to(checkpoint.path)
        linked = [name for name in folders if (Path(folder) / name).is_symlink()]
        left_out += [(base / name).as_posix() for name in linked]
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name not in linked)
        for file in sorted(files):
            name = (base / file).as_posix()
            if name in (CONFIG, INDEX) or name in checkpoint.files or file.startswith("."):
                continue
            other = file.endswith((*OTHER_WEIGHTS, *OTHER_INDEXES))
            (left_out if other or _is_special(Path(folder) / file) else names).append(name)
    _refuse_unwritable(checkpoint.path, [*names, *left_out])
    taken = [name for name in names if name in RESERVED or name.startswith(f"{FORMAT}.")]
    if taken:
        raise PackedError(
            f"{checkpoint.path}: expected no file with a name that a packed checkpoint needs, got "
            f"{shorten(taken)}. Rename or remove it."
        )
    for name in names:
        _refuse_unreadable(inside(checkpoint.path, name, follow_links=follow_links))
    return Companions(names=tuple(names), left_out=tuple(left_out))


def _is_special(path: Path) -> bool:
    """Whether a pipe, socket or device stands there, also behind a link: reading it may never end."""
    try:
        return not stat.S_ISREG(path.stat().st_mode)
    except (OSError, ValueError):
        return False  # `_refuse_unreadable` says what it is


def _refuse_unwritable(directory: Path, names: list[str]) -> None:
    """Raise for names that no JSON text can hold."""
    wrong = [ascii(name) for name in names if any("\ud800" <= char <= "\udfff" for char in name)]
    if wrong:
        raise PackedError(
            f"{directory}: expected file names in UTF-8, because the manifest lists them, got "
            f"{shorten(wrong)}. Rename or remove them."
        )


def _refuse_unreadable(path: Path) -> None:
    """Raise where there is nothing to copy, before anything is written."""
    try:
        path.stat()
    except OSError as error:
        found = (
            f"a link to {os.readlink(path)}, where there is nothing" if path.is_symlink() else error.strerror
        )
        raise PackedError(
            f"{path}: expected a file to copy, got {found}. Put the file there, or remove the link."
        ) from error
    if not os.access(path, os.R_OK):
        raise PackedError(
            f"{path}: expected a file that this user can read, because it is copied, got no permission. "
            "Make it readable."
        )


def _refuse_folder(error: OSError) -> NoReturn:
    raise PackedError(
        f"{error.filename}: expected a folder that can be listed, because what is in it is copied, got "
        f"{error.strerror}. Make it readable for this user, or move it out of the checkpoint."
    ) from error


def copy_file(source: Path, journal: Journal, name: str, progress: Progress) -> PlainFileRecord:
    """Copy a file into a run; synced, not yet renamed. It may not change meanwhile."""
    with system_errors(f"{source}: opening"):
        origin = os.open(source, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        size = os.fstat(origin).st_size
        hashed = xxhash.xxh3_128()
        file = PartialFile(journal.partial(name), size)
        try:
            buffer = memoryview(bytearray(min(COPY_BYTES, size)))
            for start in range(0, size, COPY_BYTES):
                piece = buffer[: min(COPY_BYTES, size - start)]
                _copy_piece(origin, source, file, start, piece)
                hashed.update(piece)
                progress.advance(len(piece), name)
            if os.fstat(origin).st_size != size:
                raise _changed(source, size)
            file.sync()
        finally:
            file.abandon()
    finally:
        os.close(origin)
    return PlainFileRecord(name=name, size_bytes=size, xxh3_128=hashed.hexdigest(), carried=True)


def _copy_piece(origin: int, source: Path, file: PartialFile, start: int, piece: memoryview) -> None:
    """The bytes from `start` on of an open file to the same place of another one, and into `piece`."""
    done = 0
    while done < len(piece):
        count = file.copy(origin, start + done, start + done, len(piece) - done)
        if count == 0:
            with system_errors(f"{source}: reading"):
                count = os.preadv(origin, [piece[done:]], start + done)
            if count == 0:
                raise _changed(source, start + len(piece))
            file.write(start + done, piece[done : done + count])
        done += count
    file.read(start, piece)


def _changed(source: Path, size: int) -> PackedError:
    return PackedError(
        f"{source}: expected {size} bytes, got another length. It changed while it was copied; run it again."
    )


def write_content(journal: Journal, name: str, content: bytes, progress: Progress) -> PlainFileRecord:
    """Write a small file into a run; synced, not yet renamed."""
    file = PartialFile(journal.partial(name), len(content))
    try:
        file.write(0, memoryview(content))
        file.sync()
    finally:
        file.abandon()
    progress.advance(len(content), name)
    return PlainFileRecord(name=name, size_bytes=len(content), xxh3_128=digest(content))
