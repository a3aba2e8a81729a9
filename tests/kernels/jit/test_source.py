"""The closure of headers, and what a source may not be."""

from pathlib import Path

import pytest

from marlin_moe.kernels.errors import JitError
from marlin_moe.kernels.jit.source import KernelSource
from tiny_kernel import write_tiny


def test_the_closure_follows_quoted_headers_beside_the_includer_and_in_the_root(tmp_path: Path) -> None:
    found = KernelSource(name="tiny.cu", root=write_tiny(tmp_path)).read()
    assert [name for name, _ in found.headers] == ["inner/deep.cuh", "inner/scale.cuh", "top.cuh"]
    assert found.toolkit_headers == ("cuda_fp16.h",)
    assert found.text == (tmp_path / "tiny.cu").read_text()


def test_the_file_beside_the_includer_comes_before_the_root(tmp_path: Path) -> None:
    write_tiny(tmp_path)
    (tmp_path / "deep.cuh").write_text("#error the other one is meant\n")
    names = [name for name, _ in KernelSource(name="tiny.cu", root=tmp_path).read().headers]
    assert "inner/deep.cuh" in names
    assert "deep.cuh" not in names


def test_headers_that_include_each_other_end(tmp_path: Path) -> None:
    (tmp_path / "k.cu").write_text('#include "a.cuh"\n')
    (tmp_path / "a.cuh").write_text('#pragma once\n  #  include "b.cuh"\n')
    (tmp_path / "b.cuh").write_text('#pragma once\n#include "a.cuh"\n')
    assert len(KernelSource(name="k.cu", root=tmp_path).read().headers) == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('#include "gone.cuh"\n', r"k\.cu: expected the header of #include \"gone\.cuh\" below .* got none"),
        ('#include "../outside.cuh"\n', r"k\.cu: expected the header of #include \"\.\./outside\.cuh\""),
        ("#include HEADER\n", r"k\.cu: expected #include \"\.\.\.\" or <\.\.\.>.*got '#include HEADER'"),
    ],
)
def test_a_header_that_cannot_be_followed_is_refused(tmp_path: Path, text: str, message: str) -> None:
    root = tmp_path / "root"
    root.mkdir()
    (tmp_path / "outside.cuh").write_text("")
    (root / "k.cu").write_text(text)
    with pytest.raises(JitError, match=message):
        KernelSource(name="k.cu", root=root).read()


def test_a_missing_source_is_named(tmp_path: Path) -> None:
    with pytest.raises(JitError, match=r"gone\.cu: expected a source file of the package"):
        KernelSource(name="gone.cu", root=tmp_path).read()


@pytest.mark.parametrize("name", ["/etc/k.cu", "../k.cu", "k.cuh"])
def test_a_name_is_a_cu_file_below_the_root(tmp_path: Path, name: str) -> None:
    with pytest.raises(JitError, match=r"expected a \.cu file below"):
        KernelSource(name=name, root=tmp_path)
