"""Small damages to a packed checkpoint, and its content as bytes."""

from __future__ import annotations

import json
from pathlib import Path

from mutations import flip_bit

MANIFEST = "marlin_moe.json"


def tensor_place(packed: Path, name: str) -> tuple[Path, int, int]:
    """(file, first byte, bytes) of a tensor of a packed checkpoint."""
    index = json.loads((packed / "model.safetensors.index.json").read_text())
    file = packed / index["weight_map"][name]
    raw = file.read_bytes()
    header_bytes = int.from_bytes(raw[:8], "little")
    begin, end = json.loads(raw[8 : 8 + header_bytes])[name]["data_offsets"]
    return file, 8 + header_bytes + begin, end - begin


def flip_packed_bit(packed: Path, name: str, *, byte: int = 0, bit: int = 0) -> None:
    """Flip one bit of a tensor; a negative `byte` counts from its end."""
    file, start, length = tensor_place(packed, name)
    flip_bit(file, start + byte % length, bit)


def contents(path: Path) -> dict[str, bytes]:
    """Every file below a directory, by its name there."""
    files = (file for file in path.rglob("*") if file.is_file())
    return {file.relative_to(path).as_posix(): file.read_bytes() for file in files}


def rehash(packed: Path) -> None:
    """Write the manifest anew for the files as they are, as whoever forges a packed checkpoint would."""
    import xxhash

    manifest = json.loads((packed / MANIFEST).read_text())
    for file in manifest["tensor_files"]:
        raw = (packed / file["name"]).read_bytes()
        header_bytes = 8 + int.from_bytes(raw[:8], "little")
        file["size_bytes"] = len(raw)
        file["header_xxh3_128"] = xxhash.xxh3_128_hexdigest(raw[:header_bytes])
        header = json.loads(raw[8:header_bytes])
        for tensor in file["tensors"]:
            begin, end = header[tensor["name"]]["data_offsets"]
            data = raw[header_bytes + begin : header_bytes + end]
            tensor["xxh3_128"] = xxhash.xxh3_128_hexdigest(data)
    for file in manifest["plain_files"]:
        raw = (packed / file["name"]).read_bytes()
        file["size_bytes"], file["xxh3_128"] = len(raw), xxhash.xxh3_128_hexdigest(raw)
    write_manifest(packed, manifest)


def write_manifest(packed: Path, manifest: dict) -> None:  # type: ignore[type-arg]
    """A manifest with a hash of itself that is right."""
    import xxhash

    own = {key: value for key, value in manifest.items() if key != "manifest_xxh3_128"}
    text = json.dumps(own, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
    own["manifest_xxh3_128"] = xxhash.xxh3_128_hexdigest(text)
    (packed / MANIFEST).write_text(json.dumps(own))


class StopAt:
    """`Progress` that ends the run at a file."""

    def __init__(self, file: str) -> None:
        self.file = file

    def start(self, total_bytes: int) -> None:
        """Nothing."""

    def advance(self, done_bytes: int, what: str) -> None:
        """An error at the file."""
        if what == self.file:
            raise RuntimeError("stopped")
