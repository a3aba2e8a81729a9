"""Cache, then compiler, unless compiling is forbidden: `obtain_cubin`, `compile_all`, `CompileReport`."""

import os
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from ..errors import JitError
from .cache import cache_folder, check_cache, read_entry, write_entry
from .compile import CompiledKernel, compile_cubin
from .spec import BuildSpec
from .toolkit import installed_toolkit

SWITCH = "MARLIN_MOE_JIT"

_compiling: dict[str, threading.Lock] = {}  # by key, so that threads of a process compile a spec once
_guard = threading.Lock()


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileReport:
    """One spec that was compiled, or found in the cache.

    Fields:
        name: the spec's title.
        arch: what it was compiled for.
        key: its name in the cache.
        cached: whether it was found there.
        seconds: what compiling took, now or then.
        registers: the most per thread of any kernel in it.
        spill_store_bytes, spill_load_bytes: of all its functions.
        static_smem_bytes: the most per block of any kernel in it.
        cubin_bytes: the size of the binary.
        warnings: the compiler's and the assembler's.
    """

    name: str
    arch: str
    key: str
    cached: bool
    seconds: float
    registers: int
    spill_store_bytes: int
    spill_load_bytes: int
    static_smem_bytes: int
    cubin_bytes: int
    warnings: tuple[str, ...]


def compiling_is_forbidden() -> bool:
    """What MARLIN_MOE_JIT says: `forbid`, or `allow` like nothing.

    Raises:
        JitError: it says something else.
    """
    value = os.environ.get(SWITCH, "")
    if value not in ("", "allow", "forbid"):
        raise JitError(f"{SWITCH}: expected allow or forbid, got {value!r}. Unset it to allow compiling.")
    return value == "forbid"


def obtain_cubin(spec: BuildSpec) -> CompiledKernel:
    """The spec's cubin, from the cache or else compiled and put there.

    Raises:
        JitError: as `compile_cubin`; or it would have to be compiled and MARLIN_MOE_JIT forbids it.
    """
    forbidden = compiling_is_forbidden()
    return _find_or_compile(spec, forbidden=forbidden, cache=True).compiled


def compile_all(
    specs: Iterable[BuildSpec], *, cache: bool = True, must_store: bool = False, jobs: int | None = None
) -> list[CompileReport]:
    """Compiles ahead what the cache does not hold, several at once, whatever MARLIN_MOE_JIT says.

    Args:
        specs: what to compile; equal ones are compiled once.
        cache: whether cubins are looked up in the cache and put there.
        must_store: whether one that cannot be put there is an error, and not a warning.
        jobs: how many at once; as many as this process has processors when None.

    Returns:
        One report per spec, in their order.

    Raises:
        JitError: some did not compile; the text has every one of them. The others are in the cache. Or the
            cache is refused as `check_cache` says, and nothing is compiled.
    """
    listed = list(specs)
    if cache:
        check_cache(create=must_store)
    jobs = len(os.sched_getaffinity(0)) if jobs is None else jobs
    if jobs < 1:
        raise JitError(f"jobs: expected at least 1, got {jobs}.")
    with ThreadPoolExecutor(max_workers=jobs, thread_name_prefix="marlin-moe-compile") as pool:
        futures = {
            spec: pool.submit(_find_or_compile, spec, forbidden=False, cache=cache)
            for spec in dict.fromkeys(listed)
        }
    failures = [str(error) for future in futures.values() if (error := _failure(future.exception()))]
    if failures:
        texts = "\n".join(dict.fromkeys(failures))  # what is wrong with the installation is so for each
        raise JitError(f"{len(failures)} of {len(futures)} kernels did not compile:\n{texts}")
    obtained = {spec: future.result() for spec, future in futures.items()}
    if must_store:
        _check_stored(list(obtained.values()))
    return [_report(spec, obtained[spec]) for spec in listed]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Obtained:
    """A cubin, whether it was in the cache, and why it could not be put there."""

    compiled: CompiledKernel
    cached: bool
    unstored_because: str | None = None


def _find_or_compile(spec: BuildSpec, *, forbidden: bool, cache: bool) -> _Obtained:
    key = spec.key()
    with _guard:
        lock = _compiling.setdefault(key, threading.Lock())
    with lock:
        if cache and (found := read_entry(key)) is not None:
            return _Obtained(compiled=found, cached=True)
        if forbidden:
            raise JitError(_missing_text(spec, key))
        compiled = compile_cubin(spec)
        reason = write_entry(compiled) if cache else None
        return _Obtained(compiled=compiled, cached=False, unstored_because=reason)


def _missing_text(spec: BuildSpec, key: str) -> str:
    return (
        f"{spec.title}: expected a cubin for {spec.arch} in the cache, because {SWITCH}=forbid allows no "
        f"compiling, got none that is whole in {cache_folder()} under {key}. Build it ahead: "
        f"marlin-moe kernels build PATH --arch {spec.arch}, with --tp, --ep, --dtype, --max-tokens and "
        "--top-k as in the process that loads the layers, the same MARLIN_MOE_CACHE, this version of "
        f"marlin-moe and NVRTC {installed_toolkit().version}."
    )


def _check_stored(obtained: list[_Obtained]) -> None:
    reasons = [one.unstored_because for one in obtained if one.unstored_because is not None]
    if reasons:
        stored = len(obtained) - len(reasons)
        raise JitError(
            f"{cache_folder()}: expected to store {len(obtained)} kernels, because other processes look for "
            f"them there, got {stored or 'nothing'} stored: {'; '.join(dict.fromkeys(reasons))}. Mend it, or "
            "set MARLIN_MOE_CACHE to a folder that can be written."
        )


def _failure(error: BaseException | None) -> JitError | None:
    """The error if it is one to list; any other is raised."""
    if error is None or isinstance(error, JitError):
        return error
    raise error


def _report(spec: BuildSpec, obtained: _Obtained) -> CompileReport:
    compiled = obtained.compiled
    return CompileReport(
        name=spec.title,
        arch=spec.arch,
        key=compiled.key,
        cached=obtained.cached,
        seconds=compiled.seconds,
        registers=compiled.registers,
        spill_store_bytes=compiled.spill_store_bytes,
        spill_load_bytes=compiled.spill_load_bytes,
        static_smem_bytes=compiled.static_smem_bytes,
        cubin_bytes=len(compiled.cubin),
        warnings=compiled.warnings,
    )


def _renew_locks() -> None:
    """For a forked child, where a thread that held a lock does not exist."""
    global _guard
    _guard = threading.Lock()
    _compiling.clear()


os.register_at_fork(after_in_child=_renew_locks)
