"""One safetensors file: its header, positioned reads, and every file that is refused."""

from __future__ import annotations

import copy
import gc
import json
import os
import pickle
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from compare_layer import equal_bytes
from marlin_moe.repack.errors import CheckpointError
from marlin_moe.repack.tensor_file import DTYPES, TensorFile, tensor_bytes

TENSORS = {
    "a.bf16": torch.randn(3, 5, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16),
    "b.int32": torch.arange(-6, 6, dtype=torch.int32).view(3, 4),
    "c.scalar": torch.tensor(2.5, dtype=torch.float64),
    "d.empty": torch.empty(0, 7, dtype=torch.float16),
    "e.bool": torch.tensor([True, False, True]),
    "f.float8": torch.tensor([1.0, -2.0]).to(torch.float8_e4m3fn),
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    save_file(TENSORS, tmp_path / "some.safetensors", metadata={"format": "pt", "by": "hand"})
    return tmp_path / "some.safetensors"


def test_entries_and_reads(file: Path) -> None:
    with TensorFile(file) as opened:
        assert opened.metadata == {"format": "pt", "by": "hand"}
        assert opened.size_bytes == file.stat().st_size
        assert set(opened.entries) == set(TENSORS)
        for name, tensor in TENSORS.items():
            entry = opened.entries[name]
            assert (entry.torch_dtype, entry.shape, entry.nbytes) == (
                tensor.dtype,
                tuple(tensor.shape),
                tensor.nbytes,
            )
            assert entry.file == "some.safetensors"
            equal_bytes(opened.read(name), tensor, name)
            raw = file.read_bytes()[entry.offset_bytes : entry.offset_bytes + entry.nbytes]
            assert raw == bytes(tensor_bytes(tensor)), name


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_an_open_file_is_not_copied(
    copied: Callable[[TensorFile], object], file: Path, tmp_path: Path
) -> None:
    """A copy would close a descriptor that is another file's by then."""
    expected = r"some\.safetensors: expected an open file to stay.*open that"
    with TensorFile(file) as opened, pytest.raises(TypeError, match=expected):
        copied(opened)
    with (tmp_path / "other").open("w") as other:
        gc.collect()
        other.write("x")


def test_read_into_a_part_of_another_tensor(file: Path) -> None:
    out = torch.full((4, 3, 5), 9.0, dtype=torch.bfloat16)
    with TensorFile(file, name="as the index calls it") as opened:
        opened.read_into("a.bf16", out[2])
        assert opened.entries["a.bf16"].file == "as the index calls it"
        with pytest.raises(CheckpointError, match=r"a\.bf16: expected a buffer of 30 bytes, got one of 20"):
            opened.read_into("a.bf16", torch.empty(10, dtype=torch.bfloat16))
        with pytest.raises(ValueError, match="contiguous CPU tensor"):
            opened.read_into("a.bf16", torch.empty(5, 3, dtype=torch.bfloat16).T)
    equal_bytes(out[2], TENSORS["a.bf16"], "the slice")
    assert (out[[0, 1, 3]] == 9).all()


def test_dtypes_are_those_that_safetensors_writes(tmp_path: Path) -> None:
    for name, dtype in DTYPES.items():
        save_file({"x": torch.zeros(2, dtype=torch.int8).to(dtype)}, tmp_path / "x.safetensors")
        with TensorFile(tmp_path / "x.safetensors") as opened:
            assert (opened.entries["x"].dtype, opened.entries["x"].torch_dtype) == (name, dtype)


def write(path: Path, header: object, data: bytes = b"", *, length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda p: p.write_bytes(b""), "zero bytes. Fetch it again"),
        (lambda p: p.write_bytes(b"\1\2\3"), "got 3 bytes that safetensors refuses"),
        (lambda p: p.write_bytes(b"PK\3\4" + bytes(100)), "safetensors refuses"),
        (lambda p: p.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n"), "refuses"),
        (lambda p: write(p, {"x": ENTRY}, bytes(7)), "cut short"),
        (lambda p: write(p, {"x": ENTRY}, bytes(9)), "refuses"),
        (lambda p: write(p, {"x": ENTRY}, bytes(8), length=1 << 40), "refuses"),
        (lambda p: write(p, b"{"), "refuses"),
        (lambda p: write(p, [1]), "refuses"),
        (lambda p: write(p, {"x": ENTRY | {"shape": [3]}}, bytes(8)), "refuses"),
        (lambda p: write(p, {"x": ENTRY | {"shape": [-2]}}, bytes(8)), "refuses"),
        (lambda p: write(p, {"x": ENTRY | {"dtype": "F31"}}, bytes(8)), "refuses"),
        (lambda p: write(p, {"x": ENTRY, "y": ENTRY}, bytes(8)), "refuses"),
        (lambda p: write(p, {"x": ENTRY | {"data_offsets": [8, 0]}}, bytes(8)), "refuses"),
        (lambda p: p.mkdir(), "x.safetensors"),
    ],
)
def test_files_that_are_no_safetensors(tmp_path: Path, make: Callable[[Path], object], text: str) -> None:
    make(tmp_path / "x.safetensors")
    with pytest.raises(CheckpointError, match=text) as caught:
        TensorFile(tmp_path / "x.safetensors")
    assert str(tmp_path / "x.safetensors") in str(caught.value)


def test_missing_and_unreadable(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"gone\.safetensors: .*got No such file"):
        TensorFile(tmp_path / "gone.safetensors")


def test_cut_short_between_opening_and_reading(file: Path) -> None:
    with TensorFile(file) as opened:
        entry = opened.entries["b.int32"]
        with file.open("r+b") as handle:
            handle.truncate(entry.offset_bytes + 20)
        with pytest.raises(
            CheckpointError, match=r"b\.int32: expected 48 bytes .*ends after 20 of them.*cut short"
        ):
            opened.read("b.int32")


def test_replaced_between_opening_and_reading(file: Path) -> None:
    """A file renamed over it is another file: the open one is read to its end."""
    with TensorFile(file) as opened:
        os.replace(write(file.with_name("new"), {"x": ENTRY}, bytes(8)), file)
        equal_bytes(opened.read("b.int32"), TENSORS["b.int32"], "b.int32")


def test_closed(file: Path) -> None:
    opened = TensorFile(file)
    opened.close()
    opened.close()
    with pytest.raises(CheckpointError, match=r"b\.int32: reading .*Bad file descriptor"):
        opened.read("b.int32")


def test_no_descriptor_is_left_open(file: Path, tmp_path: Path) -> None:
    def descriptors() -> int:
        gc.collect()
        return len(os.listdir("/proc/self/fd"))

    (tmp_path / "broken.safetensors").write_bytes(b"broken")
    before = descriptors()
    for _ in range(5):
        TensorFile(file)
        with pytest.raises(CheckpointError):
            TensorFile(tmp_path / "broken.safetensors")
    assert descriptors() == before


def test_an_unknown_dtype_is_named(tmp_path: Path) -> None:
    write(
        tmp_path / "x.safetensors",
        {"x": {"dtype": "F8_E8M0", "shape": [2], "data_offsets": [0, 2]}},
        bytes(2),
    )
    with (
        TensorFile(tmp_path / "x.safetensors") as opened,
        pytest.raises(
            CheckpointError, match=r"x: expected a dtype that torch has .*got F8_E8M0 in x\.safetensors"
        ),
    ):
        opened.read("x")


def test_what_is_no_regular_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.safetensors")
    (tmp_path / "folder.safetensors").mkdir()
    for name, kind in (("pipe", "a named pipe"), ("folder", "a directory")):
        with pytest.raises(CheckpointError, match=f"expected a regular file.*got {kind}"):
            TensorFile(tmp_path / f"{name}.safetensors")
