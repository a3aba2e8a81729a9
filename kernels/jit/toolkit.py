"""The NVRTC and the CUDA headers of this machine: `Toolkit`, `installed_toolkit`. Needs no GPU, no driver."""

import functools
import hashlib
import importlib
import os
import re
import threading
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from ..errors import JitError
from .source import INCLUDE

INSTALL = "Install them with: pip install 'marlin-moe[cuda]'"
BUILD_ID = re.compile(r"Compiler Build ID: (\S+)\n// .*\bV(\d+\.\d+\.\d+)")
HEADER_SETS = ("cudart", "cccl")  # cuda_fp16.h and cooperative_groups.h; the nv/target that the latter wants

_import_lock = threading.RLock()


@dataclass(frozen=True, slots=True, kw_only=True)
class Toolkit:
    """What compiles here.

    Fields:
        version: NVRTC's full version, as "13.0.88".
        build: NVRTC's build number, as it writes it into its output.
        include_folders: where `#include <...>` is searched.
        compute_capabilities: those that NVRTC compiles for, as 80, 90, 120.
    """

    version: str
    build: str
    include_folders: tuple[str, ...]
    compute_capabilities: tuple[int, ...]


def import_cuda(name: str) -> ModuleType:
    """A module of cuda.core or cuda.bindings.

    One thread at a time: cuda.core puts another module into its own place while it is imported, which the
    interpreter's lock does not cover, and a second thread would get it half made.

    Raises:
        JitError: the extra `cuda` is not installed.
    """
    try:
        with _import_lock:
            return importlib.import_module(name)
    except ImportError as error:
        raise JitError(
            f"{name}: expected the packages that compile and launch CUDA kernels, got: {error}. {INSTALL}"
        ) from error


@functools.lru_cache(maxsize=1)
def installed_toolkit() -> Toolkit:
    """The toolkit that compiles in this process; looked up once, for about 50 ms.

    Raises:
        JitError: the extra `cuda` is not installed, or not wholly.
    """
    import_cuda("cuda.core")
    nvrtc = import_cuda("cuda.bindings.nvrtc")
    pathfinder = import_cuda("cuda.pathfinder")
    try:
        build, version = _identity(nvrtc)
        (capabilities,) = _checked(nvrtc, nvrtc.nvrtcGetSupportedArchs())
    except RuntimeError as error:  # the library cannot be found or loaded
        raise JitError(f"NVRTC: expected the CUDA 13 run-time compiler, got: {error}. {INSTALL}") from error
    found = [pathfinder.find_nvidia_header_directory(name) for name in HEADER_SETS]
    if found[0] is None:
        raise JitError(f"CUDA headers: expected cuda_fp16.h of CUDA 13, got no folder with it. {INSTALL}")
    return Toolkit(
        version=version,
        build=build,
        include_folders=tuple(dict.fromkeys(str(folder) for folder in found if folder is not None)),
        compute_capabilities=tuple(int(number) for number in capabilities),
    )


@functools.lru_cache(maxsize=64)
def toolkit_headers_digest(names: tuple[str, ...]) -> str:
    """SHA-256 over the toolkit headers with these names and all that they can include.

    Every `#include` counts, whether the preprocessor would reach it or not: too much rather than too little.
    Where a header is, is not part of it: equal headers in a wheel and in a toolkit give equal digests.
    """
    folders = [Path(folder) for folder in installed_toolkit().include_folders]
    digests: dict[str, str] = {}
    pending: list[tuple[str, Path | None]] = [
        (name, None) for name in names
    ]  # as written, where "..." looks first
    while pending:
        name, beside = pending.pop()
        candidates = [folder / name for folder in ([beside] if beside else []) + folders]
        path = next((candidate for candidate in candidates if candidate.is_file()), None)
        if path is None:
            continue  # the host's headers, behind #ifdefs; if the compiler wants one, it says so
        folder = max((f for f in folders if path.is_relative_to(f)), key=lambda f: len(f.parts))
        label = path.relative_to(folder).as_posix()
        if label in digests:
            continue
        content = path.read_bytes()
        digests[label] = hashlib.sha256(content).hexdigest()
        for match in INCLUDE.finditer(content.decode("utf-8", errors="replace")):
            quoted, angled, _ = match.groups()
            if quoted is not None:
                pending.append((quoted, path.parent))
            elif angled is not None:
                pending.append((angled, None))
    whole = "".join(f"{label}\0{digests[label]}\n" for label in sorted(digests))
    return hashlib.sha256(whole.encode()).hexdigest()


def _identity(nvrtc: ModuleType) -> tuple[str, str]:
    """NVRTC's build and full version, from the head of the PTX that it makes of nothing.

    nvrtcVersion() says no more than 13.0, and a wheel's metadata may not be the library that was loaded.
    """
    (program,) = _checked(nvrtc, nvrtc.nvrtcCreateProgram(b"", b"nothing.cu", 0, [], []))
    try:
        _checked(nvrtc, nvrtc.nvrtcCompileProgram(program, 0, []))
        (nbytes,) = _checked(nvrtc, nvrtc.nvrtcGetPTXSize(program))
        ptx = bytearray(nbytes)
        _checked(nvrtc, nvrtc.nvrtcGetPTX(program, ptx))
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    match = BUILD_ID.search(ptx.decode("ascii", errors="replace"))
    if match is None:
        raise JitError(f"NVRTC: expected its build number at the head of its PTX, got {bytes(ptx[:200])!r}.")
    return match[1], match[2]


def _checked(nvrtc: ModuleType, answer: tuple[Any, ...]) -> tuple[Any, ...]:
    if answer[0] != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise JitError(f"NVRTC: expected success, got {answer[0]!r}. {INSTALL}")
    return answer[1:]


def _renew_lock() -> None:
    """For a forked child, where a thread that held the lock does not exist."""
    global _import_lock
    _import_lock = threading.RLock()


os.register_at_fork(after_in_child=_renew_lock)
