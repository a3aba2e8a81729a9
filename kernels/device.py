"""Devices: the ones that a user may name, and whether this package's CUDA kernels run on one."""

import functools
import importlib.util

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


@functools.lru_cache(maxsize=64)
def sm_count(device: torch.device) -> int:
    """The device's multiprocessors."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@functools.lru_cache(maxsize=64)
def architecture(device: torch.device) -> str:
    """The device's architecture as the compiler names it: `sm_90a`."""
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}{'a' if major >= 9 else ''}"
