"""A packed checkpoint against its source: packed tensors are inverted and compared as bytes.

No stage that made them runs, so a fault of the stages cannot hide in their repetition.
"""

from collections.abc import Callable, Iterator, Mapping, Set
from pathlib import Path

import torch
import xxhash

from ..checkpoint import CONFIG, INDEX, Checkpoint, shorten
from ..errors import CheckpointError
from ..progress import Progress
from ..states import ExpertTensors
from ..tensor_file import TensorEntry, tensor_bytes
from .companions import find_companions
from .differences import Problem, first_difference
from .durable import COPY_BYTES, read_pieces
from .names import MANIFEST, SOURCE_CONFIG, packed_config
from .reader import PackedCheckpoint
from .records import LayerRecord
from .rest_files import in_parts, rest_tensors
from .restore import RestoredBlock, restored_blocks
from .source import SourceLayout, describe_source
from .source_tensors import SourcePart, parts_of

PART_BYTES = 256 << 20
"""Tensors that are no routed experts are compared in parts of this size, side by side."""

Comparison = Callable[[], Iterator[Problem]]


def source_comparisons(
    packed: PackedCheckpoint, source: Checkpoint, progress: Progress, *, block_bytes: int
) -> list[Comparison]:
    """Comparisons that find all in which the packed checkpoint is not its source; they may run at once."""
    fingerprint, config, companions = file_comparisons(packed, source)
    tensors = tensor_comparisons(packed, source, progress, block_bytes=block_bytes)
    return [fingerprint, config, *tensors, companions]


def tensor_comparisons(
    packed: PackedCheckpoint, source: Checkpoint, progress: Progress, *, block_bytes: int
) -> list[Comparison]:
    """Those that read tensors, layers first."""
    modules = [layer.module for layer in packed.manifest.layers]
    theirs = {entry.name: entry for entry in rest_tensors(source, modules)}
    mine = {entry.name: entry for entry in rest_tensors(packed.checkpoint, modules)}

    def of_layer(layer: LayerRecord) -> Comparison:
        return lambda: layer_problems(packed.experts(layer), source, layer, progress, block_bytes=block_bytes)

    def of_rest(part: list[TensorEntry]) -> Comparison:
        return lambda: _rest_problems(packed, source, part, mine, progress)

    both = [entry for name, entry in theirs.items() if name in mine]
    return [
        *map(of_layer, packed.manifest.layers),
        lambda: _name_problems(theirs.keys(), mine.keys()),
        *map(of_rest, in_parts(both, part_bytes=PART_BYTES)),
    ]


def file_comparisons(
    packed: PackedCheckpoint, source: Checkpoint
) -> tuple[Comparison, Comparison, Comparison]:
    """Those that read no tensor: names, sizes and headers of the source's files, its config, companions."""
    return (
        lambda: _fingerprint_problems(packed, source),
        lambda: _config_problems(packed, source),
        lambda: _companion_problems(packed, source),
    )


def _fingerprint_problems(packed: PackedCheckpoint, source: Checkpoint) -> Iterator[Problem]:
    record, layout = describe_source(source)
    if record != packed.manifest.source:
        wanted = {file.name: file for file in packed.manifest.source.files}
        found = {file.name: file for file in record.files}
        names = [name for name in {**wanted, **found} if wanted.get(name) != found.get(name)]
        names += [CONFIG] if record.config_xxh3_128 != packed.manifest.source.config_xxh3_128 else []
        names += [INDEX] if record.index_xxh3_128 != packed.manifest.source.index_xxh3_128 else []
        yield Problem(
            name=MANIFEST,
            message=(
                f"{packed.path}: expected the source that it was packed from, got {source.path}, which "
                f"differs in {shorten(names)} (name, size or header)."
            ),
        )
    elif SourceLayout.read(packed.path, packed.manifest.source) != layout:
        yield Problem(
            name=MANIFEST, message=f"{packed.path}: source_files.json differs from the source's headers."
        )


def _config_problems(packed: PackedCheckpoint, source: Checkpoint) -> Iterator[Problem]:
    config = (source.path / CONFIG).read_bytes()
    for name, wanted in ((SOURCE_CONFIG, config), (CONFIG, packed_config(config))):
        if (packed.path / name).read_bytes() != wanted:
            yield Problem(
                name=name,
                message=f"{packed.path / name}: expected what {source.path / CONFIG} gives, got other text.",
            )


def layer_problems(
    experts: ExpertTensors, source: Checkpoint, layer: LayerRecord, progress: Progress, *, block_bytes: int
) -> Iterator[Problem]:
    """In what the packed experts of a layer, turned back, are not the source's."""
    of_expert, strange = parts_of(layer, source.tensors.values())
    for entry in strange:
        yield Problem(
            name=entry.name,
            message=(
                f"{entry.name}: expected in {source.path} only tensors of the experts of {layer.module} as "
                "they were when it was packed, got this one too."
            ),
        )
    numbers = range(layer.facts.num_experts)
    if set(of_expert) != set(numbers):
        yield Problem(
            name=layer.module,
            message=f"{layer.module}: expected {len(numbers)} experts in the source, got {len(of_expert)}.",
        )
        return
    for restored in restored_blocks(experts, layer, numbers, block_bytes=block_bytes):
        yield from _padding_problems(layer, restored)
        for expert in restored.block:
            for part in of_expert[expert]:
                yield from _part_problems(source, restored, part)
                progress.advance(part.nbytes, layer.module)


def _part_problems(source: Checkpoint, restored: RestoredBlock, part: SourcePart) -> Iterator[Problem]:
    entry = part.entry
    try:
        tensor = restored.tensor(part)
    except CheckpointError as error:
        yield Problem(name=entry.name, message=str(error), expert=part.expert)
        return
    original = torch.empty(part.shape, dtype=entry.torch_dtype, device="cpu")
    place = entry.offset_bytes + part.first_byte
    source.files[entry.file].read_bytes(place, tensor_bytes(original), what=entry.name)
    problem = first_difference(
        as_bytes(tensor), as_bytes(original), entry, expert=part.expert, first_byte=part.first_byte
    )
    if problem:
        yield problem


def _padding_problems(layer: LayerRecord, restored: RestoredBlock) -> Iterator[Problem]:
    for name, padding in restored.padding.items():
        for i in torch.nonzero((padding != 0).flatten(1).any(1)).flatten().tolist():
            expert = restored.block[i]
            yield Problem(
                name=f"{layer.module}.{name}",
                expert=expert,
                message=(
                    f"{layer.module}.{name}: expected zeros beyond the intermediate size "
                    f"{layer.facts.intermediate_size}, got other values in expert {expert}."
                ),
            )


def _name_problems(theirs: Set[str], mine: Set[str]) -> Iterator[Problem]:
    for name in sorted(theirs ^ mine):
        where = "the source alone" if name in theirs else "the packed checkpoint alone"
        yield Problem(name=name, message=f"{name}: expected in both, got it in {where}.")


def _rest_problems(
    packed: PackedCheckpoint,
    source: Checkpoint,
    entries: list[TensorEntry],
    mine: Mapping[str, TensorEntry],
    progress: Progress,
) -> Iterator[Problem]:
    """Tensors of the source that both have, byte for byte."""
    buffers = [torch.empty(COPY_BYTES, dtype=torch.uint8, device="cpu") for _ in range(2)]
    for entry in entries:
        name = entry.name
        progress.advance(entry.nbytes, name)
        if (mine[name].dtype, mine[name].shape) != (entry.dtype, entry.shape):
            yield Problem(
                name=name,
                message=(
                    f"{name}: expected {entry.dtype} {entry.shape} as in the source, "
                    f"got {mine[name].dtype} {mine[name].shape}."
                ),
            )
            continue
        for start in range(0, entry.nbytes, COPY_BYTES):
            count = min(COPY_BYTES, entry.nbytes - start)
            pieces = [buffer[:count] for buffer in buffers]
            for piece, checkpoint, place in zip(
                pieces, (packed.checkpoint, source), (mine[name], entry), strict=True
            ):
                checkpoint.files[place.file].read_bytes(
                    place.offset_bytes + start, tensor_bytes(piece), what=name
                )
            problem = first_difference(pieces[0], pieces[1], entry, first_byte=start)
            if problem:
                yield problem
                break


def _companion_problems(packed: PackedCheckpoint, source: Checkpoint) -> Iterator[Problem]:
    theirs = set(find_companions(source, follow_links=True).names)
    mine = {record.name: record for record in packed.manifest.plain_files if record.carried}
    yield from _name_problems(theirs, mine.keys())
    for name in sorted(theirs & mine.keys()):
        if file_digest(source.path / name) != mine[name].xxh3_128:
            yield Problem(
                name=name, message=f"{packed.path / name}: expected the bytes of {source.path / name}."
            )


def file_digest(path: Path) -> str:
    """xxh3-128 of a file."""
    hashed = xxhash.xxh3_128()
    for piece in read_pieces(path, bytearray(COPY_BYTES)):
        hashed.update(piece)
    return str(hashed.hexdigest())


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """uint8 [n]: the bytes of a tensor."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)
