"""The source of a packed checkpoint: its fingerprint, and what `unpack` needs to write its files again.

`source_files.json` holds the header of every source file word for word (names, dtypes, order and metadata of
all tensors, so also where a `weight_shape` or `weight_g_idx` was) and the text of the index.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..checkpoint import CONFIG, INDEX, Checkpoint
from ..errors import PackedError
from ..tensor_file import TensorEntry, header_entries
from .decode import decoded
from .durable import canonical_json, digest, read_regular
from .names import SOURCE_FILES


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceFile:
    """One safetensors file of the source; the header is hashed with its length in front."""

    name: str
    size_bytes: int
    header_xxh3_128: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceRecord:
    """The source's fingerprint: what it was packed from."""

    files: tuple[SourceFile, ...]
    config_xxh3_128: str
    index_xxh3_128: str | None

    @property
    def fingerprint(self) -> str:
        """One hash of all of it."""
        return digest(canonical_json(asdict(self)))

    def as_json(self) -> dict[str, Any]:
        """A JSON object."""
        return {**asdict(self), "files": [asdict(file) for file in self.files]}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "SourceRecord":
        """The inverse of `as_json`."""
        own = dict(content)
        return decoded(cls, own, files=tuple(decoded(SourceFile, file) for file in own.pop("files")))


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceLayout:
    """What `source_files.json` says: file name -> header bytes (length included), and the index."""

    headers: Mapping[str, bytes]
    sizes: Mapping[str, int]
    index: str | None

    def entries(self, file: str) -> list[TensorEntry]:
        """The tensors of one source file in the order of their bytes."""
        header = self.headers[file]
        entries = header_entries(json.loads(header[8:]), file=file, header_bytes=len(header)).values()
        return sorted(entries, key=lambda entry: (entry.offset_bytes, entry.nbytes))

    def as_bytes(self) -> bytes:
        """The content of `source_files.json`."""
        files = [
            {"name": name, "size_bytes": self.sizes[name], "header": header[8:].decode()}
            for name, header in self.headers.items()
        ]
        return (json.dumps({"files": files, "index": self.index}, ensure_ascii=False) + "\n").encode()

    @classmethod
    def read(cls, path: Path, record: SourceRecord) -> "SourceLayout":
        """The layout of a packed directory, against the fingerprint in its manifest."""
        place = path / SOURCE_FILES
        try:
            content = json.loads(read_regular(place))
            texts = {file["name"]: file["header"].encode() for file in content["files"]}
            sizes = {file["name"]: int(file["size_bytes"]) for file in content["files"]}
            index = content["index"]
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise PackedError(
                f"{place}: expected the headers of the source's files, got {error!r}. "
                "Repack the source again."
            ) from error
        headers = {name: len(text).to_bytes(8, "little") + text for name, text in texts.items()}
        found = tuple(
            SourceFile(name=name, size_bytes=sizes[name], header_xxh3_128=digest(header))
            for name, header in headers.items()
        )
        if (
            found != record.files
            or (None if index is None else digest(index.encode())) != record.index_xxh3_128
        ):
            raise PackedError(
                f"{place}: expected the source files that marlin_moe.json names, got others. The file was "
                "altered; repack the source again."
            )
        return cls(headers=headers, sizes=sizes, index=index)


def describe_source(checkpoint: Checkpoint) -> tuple[SourceRecord, SourceLayout]:
    """The fingerprint of an open source and what to keep of its files; only headers are read."""
    headers: dict[str, bytes] = {}
    for name, file in checkpoint.files.items():
        header = bytearray(file.header_bytes)
        file.read_bytes(0, memoryview(header), what=f"{name} (header)")
        headers[name] = bytes(header)
    index = (checkpoint.path / INDEX).read_bytes() if checkpoint.index is not None else None
    record = SourceRecord(
        files=tuple(
            SourceFile(name=n, size_bytes=f.size_bytes, header_xxh3_128=digest(headers[n]))
            for n, f in checkpoint.files.items()
        ),
        config_xxh3_128=digest((checkpoint.path / CONFIG).read_bytes()),
        index_xxh3_128=None if index is None else digest(index),
    )
    sizes = {name: file.size_bytes for name, file in checkpoint.files.items()}
    return record, SourceLayout(headers=headers, sizes=sizes, index=None if index is None else index.decode())
