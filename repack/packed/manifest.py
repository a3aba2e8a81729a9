"""`marlin_moe.json`: what a packed checkpoint holds. Without a valid one a directory is no checkpoint."""

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..checkpoint import is_below
from ..errors import MarlinMoEError, PackedError
from .durable import canonical_json, digest, read_regular
from .names import FORMAT, LAYOUT, MANIFEST, VERSION, WORK_FOLDER
from .records import LayerRecord, PlainFileRecord, TensorFileRecord
from .source import SourceRecord

SELF = "manifest_xxh3_128"
"""Key of the hash of all the rest, keys sorted, without spaces: a hand that edits the manifest is seen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The content of `marlin_moe.json`."""

    layers: tuple[LayerRecord, ...]
    tensor_files: tuple[TensorFileRecord, ...]
    plain_files: tuple[PlainFileRecord, ...]
    source: SourceRecord

    @property
    def files(self) -> tuple[TensorFileRecord | PlainFileRecord, ...]:
        """All files but the manifest itself."""
        return (*self.tensor_files, *self.plain_files)

    @property
    def size_bytes(self) -> int:
        """Bytes of them."""
        return sum(file.size_bytes for file in self.files)

    @property
    def file_names(self) -> set[str]:
        """Every file of the directory, the manifest included."""
        return {MANIFEST, *(file.name for file in self.files)}

    def as_bytes(self) -> bytes:
        """The text of `marlin_moe.json`."""
        content: dict[str, Any] = {
            "format": FORMAT,
            "version": VERSION,
            "layout": LAYOUT,
            "layers": [layer.as_json() for layer in self.layers],
            "tensor_files": [file.as_json() for file in self.tensor_files],
            "plain_files": [file.as_json() for file in self.plain_files],
            "source": self.source.as_json(),
        }
        content[SELF] = digest(canonical_json(content))
        return (json.dumps(content, indent=1, ensure_ascii=False) + "\n").encode()

    @classmethod
    def read(cls, path: Path) -> "Manifest":
        """The manifest of a packed directory.

        Raises:
            PackedError: none, an altered one, or one of another version or layout.
        """
        place = path / MANIFEST
        content = _read_json(place)
        _check_version(place, content)
        own = {key: value for key, value in content.items() if key != SELF}
        if content.get(SELF) != digest(canonical_json(own)):
            raise PackedError(
                f"{place}: expected content of hash {content.get(SELF)}, as it says itself, got "
                f"{digest(canonical_json(own))}. It was edited or damaged; repack the source again."
            )
        try:
            manifest = cls(
                layers=tuple(map(LayerRecord.from_json, content["layers"])),
                tensor_files=tuple(map(TensorFileRecord.from_json, content["tensor_files"])),
                plain_files=tuple(map(PlainFileRecord.from_json, content["plain_files"])),
                source=SourceRecord.from_json(content["source"]),
            )
            _check_names(manifest)
        except (KeyError, TypeError, ValueError, MarlinMoEError) as error:
            raise PackedError(
                f"{place}: expected a manifest of version {VERSION}, got one that lacks or misnames "
                f"something: {error!r}. Repack the source again."
            ) from error
        return manifest


def _check_names(manifest: Manifest) -> None:
    """Raise ValueError for files outside the directory, and for what is named twice or nowhere."""
    files = [file.name for file in manifest.files]
    tensors = [tensor.name for file in manifest.tensor_files for tensor in file.tensors]
    modules = [layer.module for layer in manifest.layers]
    for name in [*files, *(file.name for file in manifest.source.files)]:
        if not is_below(name):
            raise ValueError(f"expected names of files inside the directory, got {name!r}")
    for names in (files, tensors, modules):
        twice = [name for name, count in Counter(names).items() if count > 1]
        if twice:
            raise ValueError(f"expected each name once, got {twice[0]!r} again")
    lost = [layer.file for layer in manifest.layers if layer.file not in files]
    if lost:
        raise ValueError(f"expected every layer's file among the files, got no {lost[0]!r}")


def _read_json(place: Path) -> dict[str, Any]:
    try:
        content = json.loads(read_regular(place))
    except FileNotFoundError as error:
        stopped = (place.parent / WORK_FOLDER).is_dir()
        found = "an interrupted run" if stopped else "none"
        advice = (
            "Run the same command again: it goes on where it stopped." if stopped else "Repack the source."
        )
        raise PackedError(
            f"{place}: expected a manifest, because without one a directory is no packed checkpoint, "
            f"got {found}. {advice}"
        ) from error
    except (OSError, ValueError, RecursionError) as error:
        raise PackedError(
            f"{place}: expected a JSON manifest, got {error}. Repack the source again."
        ) from error
    if not isinstance(content, dict):
        raise PackedError(f"{place}: expected a JSON object, got {type(content).__name__}.")
    return content


def _check_version(place: Path, content: Mapping[str, Any]) -> None:
    if content.get("format") != FORMAT:
        raise PackedError(f"{place}: expected format {FORMAT!r}, got {content.get('format')!r}.")
    if content.get("version") != VERSION or content.get("layout") != LAYOUT:
        raise PackedError(
            f"{place}: expected version {VERSION} of layout {LAYOUT['name']} {LAYOUT['version']}, which this "
            f"marlin-moe reads, got version {content.get('version')!r}, layout {content.get('layout')!r}. "
            "Install the marlin-moe that wrote it, or repack the source with this one."
        )
