"""The files of a packed directory against its manifest: sizes and headers always, hashes when asked for."""

from collections.abc import Iterator
from pathlib import Path

import xxhash

from ..checkpoint import CONFIG
from ..errors import CheckpointError, PackedError
from ..progress import Progress
from ..tensor_file import DTYPES, TensorFile
from .durable import COPY_BYTES, digest, read_pieces, read_regular
from .manifest import Manifest
from .names import MANIFEST, MARKER, OWN_FILES, WORK_FOLDER, marker_of, tensor_name
from .records import LayerRecord, PlainFileRecord, TensorFileRecord

ADVICE = "Copy the file again, or repack the source."


def size_problems(path: Path, manifest: Manifest) -> Iterator[tuple[str, str]]:
    """(file, what is wrong) of every file that is missing or not of its size."""
    for record in manifest.files:
        place = path / record.name
        try:
            found = place.stat().st_size if place.is_file() else None
        except OSError as error:
            raise PackedError(f"{place}: expected to be readable, got {error.strerror}.") from error
        if found != record.size_bytes:
            text = "nothing there" if found is None else f"{found}"
            yield (
                record.name,
                f"{place}: expected {record.size_bytes} bytes as {MANIFEST} says, got {text}. {ADVICE}",
            )


def header_problems(path: Path, record: TensorFileRecord) -> Iterator[tuple[str, str]]:
    """(file, what is wrong) of a safetensors file whose header is not the recorded one."""
    try:
        with TensorFile(path / record.name, name=record.name) as file:
            header = bytearray(file.header_bytes)
            file.read_bytes(0, memoryview(header), what=f"{record.name} (header)")
            entries = {name: (entry.dtype, entry.shape) for name, entry in file.entries.items()}
    except CheckpointError as error:
        yield record.name, str(error)
        return
    if entries != {tensor.name: (tensor.dtype, tensor.shape) for tensor in record.tensors}:
        yield (
            record.name,
            f"{path / record.name}: expected the tensors that {MANIFEST} names, got others. {ADVICE}",
        )
    if (found := digest(header)) != record.header_xxh3_128:
        yield (
            record.name,
            f"{path / record.name}: expected a header of hash {record.header_xxh3_128} as {MANIFEST} says, "
            f"got {found}. {ADVICE}",
        )


def own_file_problems(path: Path, manifest: Manifest) -> Iterator[str]:
    """What is wrong with the small files that every packed checkpoint has: they are always hashed."""
    records = {record.name: record for record in manifest.plain_files}
    for name in OWN_FILES:
        if name not in records:
            yield f"{path / MANIFEST}: expected {name} among the files, got none. Repack the source."
            return
    for name in OWN_FILES:
        try:
            content = read_regular(path / name)
        except OSError as error:
            yield f"{path / name}: expected to be readable, got {error.strerror}. {ADVICE}"
            return
        found = digest(content)
        if name == CONFIG and (marker := marker_of(content)) != MARKER:
            yield (
                f"{path / name}: expected quantization_config {MARKER}, which this marlin-moe reads, got "
                f"{marker}. Install the marlin-moe that wrote it, or repack the source with this one."
            )
        elif found != records[name].xxh3_128:
            yield _other_hash(path / name, "bytes", records[name].xxh3_128, found)


def layer_problems(path: Path, manifest: Manifest) -> Iterator[tuple[str, str]]:
    """(tensor, what is wrong) where a layer's tensors are not those that its facts ask for."""
    files = {file.name: file for file in manifest.tensor_files}
    for layer in manifest.layers:
        record = files.get(layer.file)
        found = {t.name: (t.dtype, t.shape) for t in record.tensors} if record else {}
        for name, wanted in expected_tensors(layer).items():
            dtype, shape = found.pop(name, ("nothing", None))
            if shape != wanted[1] or (wanted[0] and dtype != wanted[0]):
                yield (
                    name,
                    f"{path / layer.file}: {name}: expected {wanted[0] or ''} {wanted[1]} because of the "
                    f"layer's facts in {MANIFEST}, got {dtype} {shape or ''}. Repack the source.",
                )
        for name in found:
            yield name, f"{path / layer.file}: {name}: expected no such tensor of {layer.module}, got one."


def expected_tensors(layer: LayerRecord) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Tensor name -> (dtype, shape) of a layer as it lies packed: TP = 1, I padded to 64."""
    facts = layer.facts
    e, h, size = facts.num_experts, facts.hidden_size, facts.intermediate_size
    padded = -(-size // 64) * 64
    scales = next(name for name, dtype in DTYPES.items() if dtype == facts.scales_dtype)
    expected: dict[str, tuple[str, tuple[int, ...]]] = {}
    for matrix, form, k, n in (("w13", facts.w13, h, facts.halves * padded), ("w2", facts.w2, padded, h)):
        groups = 1 if form.group_size is None else k // form.group_size
        expected[f"{matrix}_qweight"] = ("I32", (e, k // 16, n * form.bits // 2))
        expected[f"{matrix}_scales"] = (scales, (e, groups, n))
        if not form.symmetric:
            expected[f"{matrix}_zero_points"] = ("I32", (e, groups, n * form.bits // 32))
        if facts.biased:
            expected[f"{matrix}_bias"] = (scales, (e, n))
    if facts.w13.act_order:
        expected["w13_sort_order"] = ("I32", (e, h))
    if facts.w2.act_order:
        expected["intermediate_order"] = ("I32", (e, size))
    return {tensor_name(facts.module, field): spec for field, spec in expected.items()}


def hash_problems(
    path: Path, record: TensorFileRecord | PlainFileRecord, progress: Progress
) -> Iterator[tuple[str, str]]:
    """(tensor or file, what is wrong) of bytes whose hash is not the recorded one."""
    buffer = bytearray(COPY_BYTES)
    if isinstance(record, PlainFileRecord):
        hashed = xxhash.xxh3_128()
        for piece in read_pieces(path / record.name, buffer):
            hashed.update(piece)
        progress.advance(record.size_bytes, record.name)
        if hashed.hexdigest() != record.xxh3_128:
            yield record.name, _other_hash(path / record.name, "bytes", record.xxh3_128, hashed.hexdigest())
        return
    with TensorFile(path / record.name, name=record.name) as file:
        progress.advance(file.header_bytes, record.name)
        for tensor in record.tensors:
            entry = file.entries[tensor.name]
            hashed = xxhash.xxh3_128()
            for start in range(0, entry.nbytes, len(buffer)):
                piece = memoryview(buffer)[: min(len(buffer), entry.nbytes - start)]
                file.read_bytes(entry.offset_bytes + start, piece, what=tensor.name)
                hashed.update(piece)
                progress.advance(len(piece), record.name)
            if hashed.hexdigest() != tensor.xxh3_128:
                yield (
                    tensor.name,
                    _other_hash(path / record.name, tensor.name, tensor.xxh3_128, hashed.hexdigest()),
                )


def unlisted_files(path: Path, manifest: Manifest) -> list[str]:
    """Files of the directory that the manifest does not name, hidden ones aside."""
    files = (p for p in path.rglob("*") if not p.is_dir())
    names = (p.relative_to(path) for p in files)
    listed = manifest.file_names
    return sorted(
        n.as_posix()
        for n in names
        if n.as_posix() not in listed and not n.name.startswith(".") and n.parts[0] != WORK_FOLDER
    )


def _other_hash(place: Path, what: str, expected: str, found: str) -> str:
    return f"{place}: {what}: expected xxh3-128 {expected} as {MANIFEST} says, got {found}. {ADVICE}"
