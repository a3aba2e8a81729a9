"""The other files of a checkpoint directory: tokenizer, chat template, generation config, the model's code.

They are copied byte for byte, so that the packed directory stands alone. Weights in other formats and hidden
files are left out: nothing is unpickled, and what a packed checkpoint does not hold it does not pretend to.
"""

import os
from dataclasses import dataclass
from pathlib import Path

import xxhash

from ..checkpoint import CONFIG, INDEX, Checkpoint, inside, shorten
from ..errors import PackedError
from ..progress import Progress
from .durable import COPY_BYTES, PartialFile, digest, read_pieces
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
        PackedError: a file with a name that the packed checkpoint needs itself.
    """
    names: list[str] = []
    left_out: list[str] = []
    for folder, folders, files in os.walk(checkpoint.path):
        base = Path(folder).relative_to(checkpoint.path)
        linked = [name for name in folders if (Path(folder) / name).is_symlink()]
        left_out += [(base / name).as_posix() for name in linked]
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name not in linked)
        for file in sorted(files):
            name = (base / file).as_posix()
            if name in (CONFIG, INDEX) or name in checkpoint.files or file.startswith("."):
                continue
            (left_out if file.endswith((*OTHER_WEIGHTS, *OTHER_INDEXES)) else names).append(name)
    taken = [name for name in names if name in RESERVED or name.startswith(f"{FORMAT}.")]
    if taken:
        raise PackedError(
            f"{checkpoint.path}: expected no file with a name that a packed checkpoint needs, got "
            f"{shorten(taken)}. Rename or remove it."
        )
    for name in names:
        inside(checkpoint.path, name, follow_links=follow_links)
    return Companions(names=tuple(names), left_out=tuple(left_out))


def copy_file(source: Path, journal: Journal, name: str, progress: Progress) -> PlainFileRecord:
    """Copy a file into a run; synced, not yet renamed. It may not change meanwhile."""
    size = source.stat().st_size
    hashed = xxhash.xxh3_128()
    file = PartialFile(journal.partial(name), size)
    done = 0
    try:
        for piece in read_pieces(source, bytearray(min(COPY_BYTES, size + 1))):
            if done + len(piece) > size:
                break
            file.write(done, piece)
            hashed.update(piece)
            done += len(piece)
            progress.advance(len(piece), name)
        if done != size or source.stat().st_size != size:
            raise PackedError(
                f"{source}: expected {size} bytes, got another length. It changed while it was copied; run "
                "it again."
            )
        file.sync()
    finally:
        file.abandon()
    return PlainFileRecord(name=name, size_bytes=size, xxh3_128=hashed.hexdigest(), carried=True)


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
