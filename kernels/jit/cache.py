"""Cubins on disk, one file each, whole or not at all: `read_entry`, `write_entry`.

An entry is `<cache>/cubin/v1/<key>`:

    magic 8 | format 4 | key 32 | meta bytes 4 | cubin bytes 8 | xxh3-128 of both 16 | meta (JSON) | cubin
"""

import contextlib
import errno
import json
import os
import stat
import struct
import threading
import warnings
from dataclasses import asdict, fields
from pathlib import Path

import xxhash

from ..errors import JitError, MarlinMoEWarning
from .compile import CompiledKernel
from .folder import is_private, open_private_folder
from .leftovers import remove_leftovers, temporary_name
from .ptxas import FunctionUsage
from .spec import FORMAT_VERSION

VARIABLE = "MARLIN_MOE_CACHE"
FOLDERS = ("cubin", f"v{FORMAT_VERSION}")
MAGIC = b"MMOECUBN"
HEADER = struct.Struct("<8sI32sIQ16s")

_unusable: set[Path] = set()  # said once each
_lock = threading.Lock()


def cache_root() -> Path:
    """$MARLIN_MOE_CACHE, else $XDG_CACHE_HOME/marlin-moe, else ~/.cache/marlin-moe.

    Raises:
        JitError: the first is set to a relative path or names an unknown user; or there is no home.
    """
    if own := os.environ.get(VARIABLE):
        return _absolute(own, VARIABLE)
    xdg = Path(os.environ.get("XDG_CACHE_HOME", ""))  # a relative one is to be ignored, says its standard
    return (xdg if xdg.is_absolute() else _absolute("~/.cache", "the home folder's cache")) / "marlin-moe"


def cache_folder() -> Path:
    """Where the entries are.

    Raises:
        JitError: as `cache_root`.
    """
    return cache_root().joinpath(*FOLDERS)


def check_cache(*, create: bool = False) -> None:
    """Finds what is wrong with the cache as a whole, before each kernel does.

    Args:
        create: whether it is made where it is missing, and one that cannot be is an error, not a warning.

    Raises:
        JitError: as `cache_root`; the cache folder can be written by others; or it cannot be made.
    """
    root = cache_root()
    try:
        with open_private_folder(root, below=FOLDERS, create=create):
            return
    except OSError as error:
        if not create:
            _say_unusable(root, error)
            return
        raise JitError(
            f"{root}: expected a folder to store compiled kernels in, got: {error}. Nothing was stored. "
            f"Set {VARIABLE} to a folder that can be written."
        ) from error


def read_entry(key: str) -> CompiledKernel | None:
    """The cubin with this key; None when there is none that is whole, private and of this format.

    Raises:
        JitError: as `cache_root`; or the cache folder can be written by others.
    """
    root = cache_root()
    try:
        with open_private_folder(root, below=FOLDERS, create=False) as folder:
            data = None if folder is None else _read_private_file(folder, key)
    except OSError as error:
        _say_unusable(root, error)
        return None
    return None if data is None else decode_entry(key, data)


def write_entry(compiled: CompiledKernel) -> str | None:
    """Puts a cubin into the cache; whoever reads meanwhile sees the old entry, none, or the new one whole.

    A cache that cannot be written is a warning, once per process.

    Returns:
        Why the cubin could not be written, or None.

    Raises:
        JitError: as `cache_root`; or the cache folder can be written by others.
    """
    root = cache_root()
    try:
        with open_private_folder(root, below=FOLDERS, create=True) as folder:
            if folder is None:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(root))
            remove_leftovers(folder)
            _publish(folder, compiled.key, encode_entry(compiled))
    except OSError as error:
        _say_unusable(root, error)
        return str(error)
    return None


def encode_entry(compiled: CompiledKernel) -> bytes:
    """The bytes of an entry."""
    facts = asdict(compiled)
    cubin = facts.pop("cubin")
    meta = json.dumps(facts, sort_keys=True).encode()
    digest = xxhash.xxh3_128_digest(meta + cubin)
    key = bytes.fromhex(compiled.key)
    header = HEADER.pack(MAGIC, FORMAT_VERSION, key, len(meta), len(cubin), digest)
    return b"".join((header, meta, cubin))


def decode_entry(key: str, data: bytes) -> CompiledKernel | None:
    """The entry in these bytes; None unless they are one, whole, for this key."""
    if len(data) < HEADER.size:
        return None
    magic, version, found_key, meta_bytes, cubin_bytes, digest = HEADER.unpack_from(data)
    body = data[HEADER.size :]
    if (magic, version, found_key) != (MAGIC, FORMAT_VERSION, bytes.fromhex(key)):
        return None
    if len(body) != meta_bytes + cubin_bytes or xxhash.xxh3_128_digest(body) != digest:
        return None
    try:
        facts = json.loads(body[:meta_bytes])
        names = {field.name for field in fields(CompiledKernel)} - {"cubin"}
        if facts.keys() != names or facts["key"] != key:
            return None
        return CompiledKernel(
            key=key,
            arch=facts["arch"],
            symbols=tuple((expression, symbol) for expression, symbol in facts["symbols"]),
            functions=tuple(FunctionUsage(**function) for function in facts["functions"]),
            warnings=tuple(facts["warnings"]),
            seconds=facts["seconds"],
            cubin=body[meta_bytes:],
        )
    except (ValueError, TypeError, AttributeError):
        return None  # whole, but not what this version writes


def _read_private_file(folder: int, name: str) -> bytes | None:
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC  # a FIFO is opened, not waited for
    try:
        descriptor = os.open(name, flags, dir_fd=folder)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ELOOP, errno.EACCES, errno.ENXIO):
            return None
        raise
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or not is_private(status):
            return None
        with open(descriptor, "rb", closefd=False) as file:
            return file.read()
    finally:
        os.close(descriptor)


def _publish(folder: int, name: str, data: bytes) -> None:
    temporary = temporary_name(name)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(temporary, flags, 0o600, dir_fd=folder)
    try:
        with open(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        try:
            os.replace(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
        except IsADirectoryError:
            _remove_folder(folder, name)
            os.replace(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary, dir_fd=folder)
        raise


def _remove_folder(folder: int, name: str) -> None:
    """Makes room where a folder lies in an entry's place; what is in it is not ours to remove."""
    try:
        os.rmdir(name, dir_fd=folder)
    except OSError as error:
        if error.errno != errno.ENOTEMPTY:
            raise
        raise OSError(errno.ENOTEMPTY, "a folder with files lies where a kernel belongs", name) from error


def _absolute(path: str, name: str) -> Path:
    expanded = os.path.expanduser(path)  # stays as it is where there is no such user or no home
    if not os.path.isabs(expanded):
        no_home = ", and no home is known for it" if path.startswith("~") else ""
        raise JitError(
            f"{name}: expected an absolute path, got {path!r}{no_home}. Set {VARIABLE} to an absolute path."
        )
    return Path(expanded)


def _say_unusable(root: Path, error: OSError) -> None:
    with _lock:
        new = root not in _unusable
        _unusable.add(root)
    if new:
        warnings.warn(
            f"{root}: expected to keep compiled kernels there, got: {error}. They are compiled anew in every "
            f"process; mend it, or set {VARIABLE} to a folder that can be written.",
            MarlinMoEWarning,
            stacklevel=3,
        )
