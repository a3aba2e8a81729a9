"""Tensors that are no routed experts -> `rest-xxxxx.safetensors`, unchanged.

Attention, router, shared experts, embeddings, MTP layers. They are only bytes here, so dtypes that torch does
not know are carried too.
"""

import math
from collections.abc import Iterator, Sequence

from ..checkpoint import Checkpoint
from ..progress import Progress
from ..tensor_file import TensorEntry
from .durable import COPY_BYTES
from .journal import Journal
from .names import rest_file
from .records import TensorFileRecord
from .tensor_writer import FilePlan, TensorWriter, plan_file

REST_FILE_BYTES = 4 << 30
"""A rest file takes tensors until it holds this many bytes."""


def rest_tensors(checkpoint: Checkpoint, modules: Sequence[str]) -> list[TensorEntry]:
    """Every tensor of no module in `modules`, in the order in which they lie in the source's files."""
    inside = tuple(f"{module}." for module in modules)
    files = {name: i for i, name in enumerate(checkpoint.files)}
    rest = [entry for entry in checkpoint.tensors.values() if not entry.name.startswith(inside)]
    return sorted(rest, key=lambda entry: (files[entry.file], entry.offset_bytes))


def in_parts(entries: Sequence[TensorEntry], *, part_bytes: int) -> list[list[TensorEntry]]:
    """Tensors in their order, as many together as reach `part_bytes`."""
    parts: list[list[TensorEntry]] = []
    held = part_bytes
    for entry in entries:
        if held >= part_bytes:
            parts.append([])
            held = 0
        parts[-1].append(entry)
        held += entry.nbytes
    return parts


def plan_rest_files(rest: Sequence[TensorEntry], *, file_bytes: int = REST_FILE_BYTES) -> list[FilePlan]:
    """The rest files for tensors in source order; widest items first in each file, so all lie aligned."""
    parts = in_parts(rest, part_bytes=file_bytes)
    return [
        plan_file(
            rest_file(i),
            {e.name: (e.dtype, e.shape, e.nbytes) for e in sorted(part, key=lambda e: -item_bytes(e))},
        )
        for i, part in enumerate(parts)
    ]


def item_bytes(entry: TensorEntry) -> int:
    """Bytes of an item, from the header alone; 1 where it has none or less."""
    items = math.prod(entry.shape)
    return max(1, entry.nbytes // items) if items else 1


def write_rest_file(
    checkpoint: Checkpoint, journal: Journal, plan: FilePlan, progress: Progress
) -> TensorFileRecord:
    """Copy the tensors of a plan out of the source; synced, not yet renamed."""
    buffer = bytearray(COPY_BYTES)
    with TensorWriter(journal, plan) as writer:
        for name in plan.entries:
            entry = checkpoint.tensors[name]
            for start in range(0, entry.nbytes, len(buffer)):
                piece = memoryview(buffer)[: min(len(buffer), entry.nbytes - start)]
                writer.copy(name, checkpoint.files[entry.file], entry.offset_bytes + start, piece)
                progress.advance(len(piece), plan.name)
        progress.advance(len(plan.header), plan.name)
        return writer.finish()


def read_tensor(checkpoint: Checkpoint, entry: TensorEntry, buffer: bytearray) -> Iterator[memoryview]:
    """The bytes of a tensor in order, in pieces of a reused buffer."""
    file = checkpoint.files[entry.file]
    for start in range(0, entry.nbytes, len(buffer)):
        piece = memoryview(buffer)[: min(len(buffer), entry.nbytes - start)]
        file.read_bytes(entry.offset_bytes + start, piece, what=entry.name)
        yield piece
