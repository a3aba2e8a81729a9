"""One safetensors file: its header validated, its tensors read by position into memory that the caller owns.

Reads are positioned (`preadv`) and not mapped, because a fault or a truncation under a map is a SIGBUS.
"""

import ctypes
import json
import os
import stat
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

import torch

from .errors import CheckpointError

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


MOST_BUFFERS = 512
"""Of one read; Linux takes 1024."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    """Where one tensor lies: `dtype` in safetensors' spelling, `offset_bytes` from the start of `file`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str
    offset_bytes: int
    nbytes: int

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype in torch's spelling; CheckpointError where torch has none."""
        if self.dtype not in DTYPES:
            raise CheckpointError(
                f"{self.name}: expected a dtype that torch has ({', '.join(DTYPES)}), got {self.dtype} in "
                f"{self.file}."
            )
        return DTYPES[self.dtype]


Stamp = tuple[int, int, int]
"""Of a file: bytes, time of its last change (mtime, ns) and of that of its inode (ctime, ns).

The last one nobody sets: it tells of a file that was put in the place of another one, or changed and given
its old mtime. The inode's own number would tell nothing more, and some file systems make it up.
"""


def stamp_of(found: os.stat_result) -> Stamp:
    """The stamp of a file that was looked at."""
    return found.st_size, found.st_mtime_ns, found.st_ctime_ns


class TensorFile:
    """An open safetensors file: `entries` by name, `metadata`, `stamp` when opened, and positioned reads.

    Raises:
        CheckpointError: no such file, not a safetensors file, or its length is not what its header says.
    """

    def __init__(self, path: Path, *, name: str | None = None) -> None:
        self.path = path
        self.name = path.name if name is None else name
        try:
            # without O_NONBLOCK, opening a pipe waits for its writer
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise CheckpointError(
                f"{path}: expected a readable safetensors file, got {error.strerror}. It is part of the "
                "checkpoint; fetch it again."
            ) from error
        try:
            found = os.fstat(self._fd)
            if not stat.S_ISREG(found.st_mode):
                raise CheckpointError(
                    f"{path}: expected a regular file, as safetensors files are, got "
                    f"{file_kind(found.st_mode)}. Put the file in its place; fetch it again."
                )
            self.size_bytes = found.st_size
            self.stamp = stamp_of(found)
            self.header_bytes, header = _read_header(self._fd, path, self.size_bytes)
        except BaseException:
            self.close()
            raise
        self.metadata: dict[str, str] = header.get("__metadata__", {})
        self.entries: Mapping[str, TensorEntry] = header_entries(
            header, file=self.name, header_bytes=self.header_bytes
        )

    def read(self, name: str) -> torch.Tensor:
        """A new CPU tensor with the bytes of tensor `name`."""
        entry = self.entries[name]
        out = torch.empty(entry.shape, dtype=entry.torch_dtype, device="cpu")
        self.read_into(name, out)
        return out

    def read_into(self, name: str, out: torch.Tensor) -> None:
        """Fill `out` (CPU, contiguous, of the tensor's size in bytes) with the bytes of tensor `name`."""
        entry = self.entries[name]
        if out.nbytes != entry.nbytes:
            raise CheckpointError(
                f"{name}: expected a buffer of {entry.nbytes} bytes, got one of {out.nbytes}."
            )
        self.read_bytes(entry.offset_bytes, tensor_bytes(out), what=name)

    def read_all(self, wanted: Iterable[tuple[TensorEntry, torch.Tensor]]) -> None:
        """Fill tensors (CPU, contiguous), whose entries come by offset; neighbours by one system call."""
        together: list[tuple[TensorEntry, memoryview]] = []
        for entry, out in wanted:
            if out.nbytes != entry.nbytes:
                raise CheckpointError(
                    f"{entry.name}: expected a buffer of {entry.nbytes} bytes, got one of {out.nbytes}."
                )
            end = together[-1][0].offset_bytes + together[-1][0].nbytes if together else None
            if end != entry.offset_bytes or len(together) == MOST_BUFFERS:
                self._read_together(together)
                together = []
            together.append((entry, tensor_bytes(out)))
        self._read_together(together)

    def _read_together(self, reads: list[tuple[TensorEntry, memoryview]]) -> None:
        """Tensors that lie side by side; whatever one call leaves is read, and reported, tensor by tensor."""
        done = 0
        if len(reads) > 1:
            try:
                done = os.preadv(self._fd, [buffer for _, buffer in reads], reads[0][0].offset_bytes)
            except OSError:
                done = 0
        for entry, buffer in reads:
            had = min(done, len(buffer))
            done -= had
            self.read_bytes(entry.offset_bytes + had, buffer[had:], what=entry.name)

    def read_part_into(self, name: str, start: int, out: torch.Tensor) -> None:
        """Fill `out` (CPU, contiguous, of the tensor's dtype) with elements from `start` on."""
        entry = self.entries[name]
        offset = start * out.element_size()
        if out.dtype != entry.torch_dtype or offset + out.nbytes > entry.nbytes:
            raise CheckpointError(
                f"{name}: expected a part of {entry.nbytes} bytes of {entry.dtype}, got {out.nbytes} bytes "
                f"of {out.dtype} from {offset} on."
            )
        self.read_bytes(entry.offset_bytes + offset, tensor_bytes(out), what=name)

    def read_bytes(self, offset: int, buffer: memoryview, *, what: str) -> None:
        """Fill `buffer` from `offset`; CheckpointError on a read error or where the file ends too early."""
        done = 0
        while done < len(buffer):
            try:
                count = os.preadv(self._fd, [buffer[done:]], offset + done)
            except OSError as error:
                raise CheckpointError(
                    f"{what}: reading {self.path} failed at byte {offset + done}: {error.strerror} "
                    f"(errno {error.errno}). Mend the disk or fetch the file again."
                ) from error
            if count == 0:
                raise CheckpointError(
                    f"{what}: expected {len(buffer)} bytes at {offset} of {self.path}, but the file ends "
                    f"after {done} of them. It was cut short while it was read; fetch it again."
                )
            done += count

    def fileno(self) -> int:
        """The descriptor."""
        return self._fd

    def __reduce__(self) -> NoReturn:
        """Refuse: a copy would close the descriptor that it shares, or what has that number by then."""
        raise TypeError(
            f"{self.path}: expected an open file to stay in its process, because it holds a descriptor, got "
            "an attempt to copy or pickle it. Copy the path and open that."
        )

    def close(self) -> None:
        """Close the file; reads fail afterwards."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> "TensorFile":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_fd", -1) >= 0:
            self.close()


def file_kind(mode: int) -> str:
    """What a file is that is not regular, from its `st_mode`, for messages."""
    kinds = {
        stat.S_IFDIR: "a directory",
        stat.S_IFIFO: "a named pipe",
        stat.S_IFSOCK: "a socket",
        stat.S_IFCHR: "a character device",
        stat.S_IFBLK: "a block device",
        stat.S_IFLNK: "a link",
    }
    return kinds.get(stat.S_IFMT(mode), "a special file")


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, writable; keep the tensor alive while they are used."""
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise ValueError("expected a contiguous CPU tensor")
    if tensor.nbytes == 0:
        return memoryview(bytearray())
    return memoryview((ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


def header_entries(header: Mapping[str, Any], *, file: str, header_bytes: int) -> dict[str, TensorEntry]:
    """Where the tensors of a parsed header lie, in its order; `header_bytes` stand before the data."""
    return {
        name: TensorEntry(
            name=name,
            dtype=value["dtype"],
            shape=tuple(value["shape"]),
            file=file,
            offset_bytes=header_bytes + value["data_offsets"][0],
            nbytes=value["data_offsets"][1] - value["data_offsets"][0],
        )
        for name, value in header.items()
        if name != "__metadata__"
    }


def _read_header(fd: int, path: Path, size_bytes: int) -> tuple[int, dict[str, Any]]:
    """(bytes before the data, header) after safetensors' own validation of the whole header."""
    from safetensors import SafetensorError, safe_open

    if size_bytes == 0:
        raise CheckpointError(f"{path}: expected a safetensors file, got one of zero bytes. Fetch it again.")
    try:
        with safe_open(path, framework="pt"):
            pass
    except (SafetensorError, OSError, ValueError) as error:
        if path.is_file() and b"git-lfs" in os.pread(fd, 64, 0):
            raise CheckpointError(
                f"{path}: expected a safetensors file, got a Git LFS pointer of {size_bytes} bytes, which "
                "safetensors refuses. Fetch the file that it stands for: git lfs pull."
            ) from error
        raise CheckpointError(
            f"{path}: expected a complete safetensors file, got {size_bytes} bytes that safetensors refuses: "
            f"{error}. The file is cut short, altered or of another format; fetch it again."
        ) from error
    (length,) = struct.unpack("<Q", os.pread(fd, 8, 0))
    return 8 + length, json.loads(os.pread(fd, length, 8))
