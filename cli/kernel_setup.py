"""How CUDA kernels come to this process: `KernelSetup`, from the cubin cache and two variables."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from ..kernels.errors import MarlinMoEError
from ..kernels.jit.build import compiling_is_forbidden
from ..kernels.jit.examine import CacheState, examine_cache
from ..kernels.plan import decode

Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelSetup:
    """Where kernels are kept, whether they may be compiled, and which path few rows take.

    Attributes:
        cache: the cubin cache.
        compiling: whether it is allowed; None where MARLIN_MOE_JIT says something impossible.
        decode_path: whether it is on; None where MARLIN_MOE_DECODE says something impossible.
    """

    cache: CacheState
    compiling: bool | None
    decode_path: bool | None


def examine_kernel_setup() -> tuple[KernelSetup, list[str]]:
    """The setup, and what in it keeps kernels from being found or compiled."""
    cache = examine_cache()
    problems = [] if cache.problem is None else [cache.problem]
    forbidden = _answer(compiling_is_forbidden, problems)
    decode_path = _answer(_decode_path, problems)
    return (
        KernelSetup(
            cache=cache, compiling=None if forbidden is None else not forbidden, decode_path=decode_path
        ),
        problems,
    )


def _decode_path() -> bool:
    decode.check_switch()
    return decode.ON


def _answer(ask: Callable[[], Answer], problems: list[str]) -> Answer | None:
    try:
        return ask()
    except MarlinMoEError as error:
        problems.append(str(error))
        return None
