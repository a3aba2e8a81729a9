"""Devices: the ones that a user may name, and whether this package's CUDA or Triton kernels run on one."""

import functools
import importlib.util
import os
import shutil

import torch

from .errors import MarlinMoEError

MIN_CAPABILITY = (8, 0)  # mma.m16n8k16 and cp.async


def usable_device(value: torch.device | str | int, *, name: str = "device") -> torch.device:
    """The device as its tensors name it ("cuda" becomes the current one, 1 is "cuda:1"), after an allocation.

    Raises:
        TypeError: no str, int or torch.device.
        MarlinMoEError: torch knows no such device, or this process has none; it names those that there are.
    """
    if isinstance(value, bool) or not isinstance(value, (torch.device, str, int)):
        raise TypeError(f"{name}: expected a torch.device, str or int, got {type(value).__name__} {value!r}.")
    try:
        device = torch.device("cuda", value) if isinstance(value, int) else torch.device(value)
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError, NotImplementedError, OverflowError, ValueError) as error:
        there = ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise MarlinMoEError(
            f"{name}: expected a device that there is ({', '.join(there)}), got {str(value)!r}: {reason}"
        ) from error


def reason_against_kernels(device: torch.device | None = None) -> str | None:
    """Why the CUDA kernels do not run on a CUDA device (None: the current one), or None."""
    if not torch.cuda.is_available():
        return "torch finds no CUDA device"
    if torch.version.hip:
        return "torch is built for ROCm, and the kernels are CUDA's"
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) < MIN_CAPABILITY:
        return f"the device is of compute capability {major}.{minor}, and the kernels need 8.0"
    if not has_compiler():
        return "the extra marlin-moe[cuda] is not installed, which compiles its kernels"
    return None


@functools.lru_cache(maxsize=1)
def has_compiler() -> bool:
    """Whether cuda.core is installed."""
    try:
        return importlib.util.find_spec("cuda.core") is not None
    except ModuleNotFoundError:
        return False


def triton_is_interpreted() -> bool:
    """Whether TRITON_INTERPRET asks for Triton's interpreter, as Triton reads it."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on")


def reason_against_triton(device: torch.device | None = None) -> str | None:
    """Why Triton kernels do not run on a GPU (None: the current one) or in the interpreter, or None."""
    if not has_triton():
        return "triton is not installed; torch for GPUs brings it, else the extra marlin-moe[triton]"
    if triton_is_interpreted():
        return None
    if not torch.cuda.is_available():
        return "torch finds no GPU"
    if not torch.version.hip and torch.cuda.get_device_capability(device) < MIN_CAPABILITY:
        return "Triton needs an NVIDIA GPU of compute capability 8.0"
    if os.environ.get("MARLIN_MOE_JIT") == "forbid":
        return "MARLIN_MOE_JIT=forbid, and Triton compiles in the first call"
    if not has_c_compiler():
        return "Triton compiles its launchers with a C compiler, and finds neither $CC, gcc nor clang"
    return None


@functools.lru_cache(maxsize=1)
def has_triton() -> bool:
    """Whether triton is installed."""
    return importlib.util.find_spec("triton") is not None


@functools.lru_cache(maxsize=1)
def has_c_compiler() -> bool:
    """Whether there is a C compiler where Triton looks for one."""
    return bool(os.environ.get("CC")) or any(shutil.which(name) for name in ("gcc", "clang"))


@functools.lru_cache(maxsize=64)
def sm_count(device: torch.device) -> int:
    """The device's multiprocessors."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@functools.lru_cache(maxsize=64)
def architecture(device: torch.device) -> str:
    """The device's architecture as the compiler names it: `sm_90a`."""
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}{'a' if major >= 9 else ''}"
