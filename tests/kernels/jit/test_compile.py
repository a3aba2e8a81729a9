"""Real compiles of a small kernel; NVRTC needs no GPU for them."""

import sys
from pathlib import Path
from typing import Any

import pytest

from marlin_moe.kernels.errors import JitError
from marlin_moe.kernels.jit import compile as compile_module
from marlin_moe.kernels.jit.compile import compile_cubin
from marlin_moe.kernels.jit.source import KernelSource
from marlin_moe.kernels.jit.toolkit import installed_toolkit
from tiny_kernel import tiny_spec, write_tiny

ELF_CUDA = 190


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_a_cubin_with_its_symbols_and_registers(tmp_path: Path, arch: str) -> None:
    spec = tiny_spec(write_tiny(tmp_path), arch=arch, kernels=("tiny", "fill<7>"))
    compiled = compile_cubin(spec)
    assert compiled.cubin[:4] == b"\x7fELF"
    assert int.from_bytes(compiled.cubin[18:20], "little") == ELF_CUDA
    assert compiled.symbol("tiny") == "tiny"
    assert compiled.symbol("fill<7>").startswith("_Z4fillILi7E")
    assert compiled.symbol("fill<7>").encode() in compiled.cubin
    assert 4 <= (compiled.usage("tiny").registers or 0) <= compiled.registers <= 40
    assert compiled.spill_store_bytes == compiled.spill_load_bytes == 0
    assert compiled.key == spec.key()
    assert compiled.warnings == ()


def test_constants_reach_the_kernel(tmp_path: Path) -> None:
    root = write_tiny(tmp_path)
    cubins = [compile_cubin(tiny_spec(root, constants={"FACTOR": factor})).cubin for factor in (3, 5, 3)]
    assert cubins[0] != cubins[1]
    assert cubins[0] == cubins[2]
    defined = [tiny_spec(root, constants={}, defines={"FACTOR": factor}) for factor in ("3", "5")]
    assert compile_cubin(defined[0]).cubin != compile_cubin(defined[1]).cubin
    with pytest.raises(JitError, match=r'"FACTOR" is undefined'):
        compile_cubin(tiny_spec(root, constants={}))


def test_a_cubin_is_the_same_wherever_the_sources_are_unless_it_names_them(tmp_path: Path) -> None:
    roots = [write_tiny(tmp_path / name) for name in ("one", "another")]
    one, other = (compile_cubin(tiny_spec(root)) for root in roots)
    assert one.cubin == other.cubin
    assert one.key == other.key
    one, other = (compile_cubin(tiny_spec(root, line_info=True)) for root in roots)
    assert str(roots[0]).encode() in one.cubin
    assert one.key != other.key


def test_spills_are_counted(tmp_path: Path) -> None:
    source = KernelSource(name="spill.cu", root=write_tiny(tmp_path))
    free = compile_cubin(tiny_spec(tmp_path, source=source, kernels=("spill",)))
    tight = compile_cubin(tiny_spec(tmp_path, source=source, kernels=("spill",), max_registers=24))
    assert free.spill_store_bytes == free.spill_load_bytes == 0
    assert free.registers > 64
    assert tight.registers == 24
    assert tight.spill_store_bytes > 100
    assert tight.usage("spill").spill_load_bytes > 100


def test_serialized_wgmma_is_an_error(tmp_path: Path) -> None:
    source = KernelSource(name="serial.cu", root=write_tiny(tmp_path))
    with pytest.raises(JitError, match=r"(?s)serial\.cu:serial for sm_90a: .*\(C75\d\d\).*serialized"):
        compile_cubin(tiny_spec(tmp_path, source=source, kernels=("serial",), arch="sm_90a"))


def test_warnings_are_reported_without_the_folder(tmp_path: Path) -> None:
    write_tiny(tmp_path)
    with (tmp_path / "top.cuh").open("a") as file:
        file.write("__device__ inline void f() { int unused; }\n")
    (warning,) = compile_cubin(tiny_spec(tmp_path)).warnings
    assert warning.startswith("top.cuh(3): warning #177-D")


def test_a_compile_error_has_the_kernel_the_line_and_the_text(tmp_path: Path) -> None:
    write_tiny(tmp_path)
    (tmp_path / "inner" / "deep.cuh").write_text("#pragma once\nflot deep;\n")
    message = r'(?s)tiny\.cu:tiny for sm_80: expected NVRTC to compile.*deep\.cuh\(2\): error: .*"flot"'
    with pytest.raises(JitError, match=message):
        compile_cubin(tiny_spec(tmp_path))


def test_a_compile_error_in_the_source_counts_lines_from_its_own_first(tmp_path: Path) -> None:
    write_tiny(tmp_path)
    (tmp_path / "tiny.cu").write_text("\nflot x;\n")
    with pytest.raises(JitError, match=r"tiny\.cu\(2\): error"):
        compile_cubin(tiny_spec(tmp_path))


def test_headers_of_the_working_directory_are_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, elsewhere = write_tiny(tmp_path / "root"), tmp_path / "elsewhere"
    (elsewhere / "inner").mkdir(parents=True)
    for name in ("top.cuh", "inner/scale.cuh", "inner/deep.cuh", "cuda_fp16.h"):
        (elsewhere / name).write_text(f"#error {name} of the working directory\n")
    monkeypatch.chdir(elsewhere)
    assert compile_cubin(tiny_spec(root)).cubin


def test_a_source_edited_while_compiling_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tiny(tmp_path)
    options = compile_module._options

    def edit_and_go_on(spec: Any) -> object:
        (tmp_path / "top.cuh").write_text("#pragma once\nconstexpr float TOP = 9.0f;\n")
        return options(spec)

    monkeypatch.setattr(compile_module, "_options", edit_and_go_on)
    with pytest.raises(JitError, match="unchanged while compiling"):
        compile_cubin(tiny_spec(tmp_path))


def test_an_architecture_that_nvrtc_does_not_know_is_refused_with_those_it_knows(tmp_path: Path) -> None:
    spec = tiny_spec(write_tiny(tmp_path), arch="sm_70")
    with pytest.raises(JitError, match=r"arch: expected one that NVRTC .* knows \(.*sm_80.*\), got sm_70"):
        compile_cubin(spec)


@pytest.mark.parametrize("module", ["cuda.core", "cuda.bindings.nvrtc", "cuda.pathfinder"])
def test_without_the_extra_the_error_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str
) -> None:
    spec = tiny_spec(write_tiny(tmp_path))
    installed_toolkit.cache_clear()
    monkeypatch.setitem(sys.modules, module, None)
    try:
        with pytest.raises(JitError, match=r"pip install 'marlin-moe\[cuda\]'"):
            spec.key()
    finally:
        installed_toolkit.cache_clear()


def test_without_headers_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    import cuda.pathfinder

    installed_toolkit.cache_clear()
    monkeypatch.setattr(cuda.pathfinder, "find_nvidia_header_directory", lambda name: None)
    try:
        with pytest.raises(JitError, match=r"CUDA headers: .*pip install 'marlin-moe\[cuda\]'"):
            installed_toolkit()
    finally:
        installed_toolkit.cache_clear()
