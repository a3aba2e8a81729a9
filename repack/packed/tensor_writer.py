"""A safetensors file of known names and shapes, written by position and hashed while it is written."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import xxhash

from ..errors import PackedError
from ..tensor_file import TensorEntry, TensorFile, header_entries
from .durable import PartialFile, digest
from .journal import Journal
from .records import TensorFileRecord, TensorRecord

DATA_ALIGNMENT = 4096
"""The data of a new file starts on a page, so that its tensors can be mapped as they are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FilePlan:
    """A safetensors file before it is written.

    Attributes:
        name: in the destination.
        header: its first bytes: length and JSON.
        entries: where every tensor goes, in the order of the data.
    """

    name: str
    header: bytes
    entries: Mapping[str, TensorEntry]

    @property
    def size_bytes(self) -> int:
        """Header and data."""
        return len(self.header) + sum(entry.nbytes for entry in self.entries.values())


def plan_file(name: str, tensors: Mapping[str, tuple[str, tuple[int, ...], int]]) -> FilePlan:
    """A new file with `tensors` (name -> safetensors' dtype, shape, bytes) in the given order."""
    content: dict[str, dict[str, Any]] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for key, (dtype, shape, nbytes) in tensors.items():
        content[key] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + nbytes]}
        offset += nbytes
    text = json.dumps(content, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-(len(text) + 8) % DATA_ALIGNMENT)
    header = len(text).to_bytes(8, "little") + text
    entries = header_entries(content, file=name, header_bytes=len(header))
    return FilePlan(name=name, header=header, entries=entries)


class TensorWriter:
    """Writes the file of a plan into a run; every tensor front to back, the tensors in any order.

    Leaves nothing behind when an exception ends its `with` block.
    """

    def __init__(self, journal: Journal, plan: FilePlan) -> None:
        self.plan = plan
        self._file = PartialFile(journal.partial(plan.name), plan.size_bytes)
        self._hashes = {name: xxhash.xxh3_128() for name in plan.entries}
        self._done = dict.fromkeys(plan.entries, 0)
        try:
            self._file.write(0, memoryview(plan.header))
        except BaseException:
            self._file.abandon()  # no `with` block has begun that would
            raise

    def append(self, name: str, data: memoryview) -> None:
        """The next bytes of tensor `name`."""
        entry, done = self.plan.entries[name], self._done[name]
        if done + len(data) > entry.nbytes:
            raise PackedError(
                f"{name}: expected {entry.nbytes} bytes in {self.plan.name}, got {done + len(data)}."
            )
        self._file.write(entry.offset_bytes + done, data)
        self._hashes[name].update(data)
        self._done[name] = done + len(data)

    def copy(self, name: str, source: TensorFile, offset: int, buffer: memoryview) -> None:
        """The next len(buffer) bytes of tensor `name` from `offset` of another file.

        The file system copies them, and what has arrived is read back to be hashed: from memory, where they
        are now. Where it cannot they are read and written.
        """
        entry, done, count = self.plan.entries[name], self._done[name], len(buffer)
        if done + count > entry.nbytes:
            raise PackedError(
                f"{name}: expected {entry.nbytes} bytes in {self.plan.name}, got {done + count}."
            )
        copied = 0
        while copied < count:
            more = self._file.copy(
                source.fileno(), offset + copied, entry.offset_bytes + done + copied, count - copied
            )
            if more == 0:
                source.read_bytes(offset + copied, buffer[copied:], what=name)
                self._file.write(entry.offset_bytes + done + copied, buffer[copied:])
                break
            copied += more
        self._file.read(entry.offset_bytes + done, buffer[:copied])
        self._hashes[name].update(buffer)
        self._done[name] = done + count

    def finish(self) -> TensorFileRecord:
        """Everything synced under the partial name; the file's record."""
        short = [name for name, entry in self.plan.entries.items() if self._done[name] != entry.nbytes]
        if short:
            entry = self.plan.entries[short[0]]
            raise PackedError(
                f"{short[0]}: expected {entry.nbytes} bytes before {self.plan.name} is finished, "
                f"got {self._done[short[0]]}."
            )
        self._file.sync()
        return TensorFileRecord(
            name=self.plan.name,
            size_bytes=self.plan.size_bytes,
            header_xxh3_128=digest(self.plan.header),
            tensors=tuple(
                TensorRecord(name=name, dtype=e.dtype, shape=e.shape, xxh3_128=self._hashes[name].hexdigest())
                for name, e in self.plan.entries.items()
            ),
        )

    def __enter__(self) -> "TensorWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.abandon()
