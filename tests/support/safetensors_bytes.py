"""A safetensors file as bytes ↔ its tensors as bytes: what damages a file must not go through a library."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass

import torch

DTYPES = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "U8": torch.uint8,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """One tensor of a file: its header entry and its bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: bytes

    def tensor(self) -> torch.Tensor:
        if not self.data:
            return torch.empty(self.shape, dtype=DTYPES[self.dtype])
        return torch.frombuffer(bytearray(self.data), dtype=DTYPES[self.dtype]).view(self.shape)


def stored(name: str, tensor: torch.Tensor) -> StoredTensor:
    dtype = next(text for text, known in DTYPES.items() if known == tensor.dtype)
    data = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return StoredTensor(name=name, dtype=dtype, shape=tuple(tensor.shape), data=data)


def header_length(raw: bytes) -> int:
    """Bytes before the data."""
    return 8 + int.from_bytes(raw[:8], "little")


def parse(raw: bytes) -> list[StoredTensor]:
    """Tensors in the order of their data."""
    start = header_length(raw)
    header = json.loads(raw[8:start])
    header.pop("__metadata__", None)
    found = []
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        begin, end = entry["data_offsets"]
        found.append(
            StoredTensor(
                name=name,
                dtype=entry["dtype"],
                shape=tuple(entry["shape"]),
                data=raw[start + begin : start + end],
            )
        )
    return found


def serialize(tensors: Iterable[StoredTensor]) -> bytes:
    """Two tensors of one name stay two entries, as no library would write them."""
    entries, data, offset = [json.dumps({"__metadata__": {"format": "pt"}})[1:-1]], [], 0
    for tensor in tensors:
        place = {
            "dtype": tensor.dtype,
            "shape": tensor.shape,
            "data_offsets": [offset, offset + len(tensor.data)],
        }
        entries.append(f"{json.dumps(tensor.name)}: {json.dumps(place)}")
        data.append(tensor.data)
        offset += len(tensor.data)
    header = ("{" + ", ".join(entries) + "}").encode()
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header + b"".join(data)
