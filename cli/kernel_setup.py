"""How CUDA kernels come to this process: `KernelSetup`, from the cubin cache and a variable."""

from dataclasses import dataclass

from ..kernels.errors import MarlinMoEError
from ..kernels.jit.build import compiling_is_forbidden
from ..kernels.jit.examine import CacheState, examine_cache


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelSetup:
    """Where kernels are kept, and whether they may be compiled.

    Attributes:
        cache: the cubin cache.
        compiling: whether it is allowed; None where MARLIN_MOE_JIT says something impossible.
    """

    cache: CacheState
    compiling: bool | None


def examine_kernel_setup() -> tuple[KernelSetup, list[str]]:
    """The setup, and what in it keeps kernels from being found or compiled."""
    cache = examine_cache()
    problems = [] if cache.problem is None else [cache.problem]
    compiling: bool | None = None
    try:
        compiling = not compiling_is_forbidden()
    except MarlinMoEError as error:
        problems.append(str(error))
    return KernelSetup(cache=cache, compiling=compiling), problems
