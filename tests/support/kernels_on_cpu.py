"""Sources of kernels/cuda run on a CPU through cuda_on_cpu.h: the kernels' own arithmetic, without a GPU.

`HostKernels` compiles the specs that a GPU would get and takes the arguments that its driver would get.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from marlin_moe.kernels.jit.spec import BuildSpec

COMPILER = shutil.which("c++") or shutil.which("g++")
HEADER = Path(__file__).parent / "cuda_on_cpu.h"


class HostKernels:
    """The kernels of some specs as functions of a shared library, made in `folder`."""

    def __init__(self, specs: Sequence[BuildSpec], folder: Path) -> None:
        self._libraries: dict[str, tuple[ctypes.CDLL, int]] = {}
        for number, spec in enumerate(specs):
            library = _compile(spec, folder / f"kernels{number}")
            self._libraries |= {kernel: (library, place) for place, kernel in enumerate(spec.kernels)}
        self.launched: list[str] = []

    def launch(self, kernel: str, blocks: int, arguments: Sequence[int]) -> None:
        """Run all blocks of a kernel; arguments as the driver takes them, addresses of CPU memory."""
        library, place = self._libraries[kernel]
        self.launched.append(kernel)
        getattr(library, f"kernel{place}")(blocks, (ctypes.c_longlong * len(arguments))(*arguments))


def _compile(spec: BuildSpec, stem: Path) -> ctypes.CDLL:
    """A library with `kernel0`, `kernel1`, …: (blocks, arguments as long long)."""
    functions = "\n".join(
        f'extern "C" void kernel{place}(int blocks, const long long* a) {{ call(blocks, {kernel}, a); }}'
        for place, kernel in enumerate(spec.kernels)
    )
    source = f"""#include <utility>
#include "{HEADER}"
{spec.prologue}
#include "{spec.source.root / spec.source.name}"
template <class... P, std::size_t... I>
void call_with(int blocks, void (*kernel)(P...), const long long* a, std::index_sequence<I...>) {{
  run_blocks(blocks, [&] {{ kernel((P)a[I]...); }});
}}
template <class... P>
void call(int blocks, void (*kernel)(P...), const long long* a) {{
  call_with(blocks, kernel, a, std::index_sequence_for<P...>());
}}
{functions}
"""
    stem.with_suffix(".cpp").write_text(source)
    options = (
        "-std=c++20",
        "-O1",
        "-fno-strict-aliasing",
        "-shared",
        "-fPIC",
        "-pthread",
        "-Wno-unknown-pragmas",
    )
    names = (str(stem.with_suffix(".cpp")), "-o", str(stem.with_suffix(".so")))
    done = subprocess.run([str(COMPILER), *options, *names], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{spec.title}: {done.stderr}")
    return ctypes.CDLL(str(stem.with_suffix(".so")))
