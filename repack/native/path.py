"""Which path repacks: the C loop on a CPU, the kernel on a GPU, or torch operations. The bytes are one."""

import functools
import importlib
import os
from dataclasses import dataclass
from types import ModuleType

import torch

from ...kernels.device import architecture, reason_against_kernels
from ...kernels.errors import MarlinMoEError

SWITCH = "MARLIN_MOE_NATIVE"
BUILD_ADVICE = "Install a C compiler and the package again, or unset the variable to use torch operations."
INSTALL_ADVICE = "pip install 'marlin-moe[cuda]', or unset the variable to use torch operations."


@dataclass(frozen=True, slots=True, kw_only=True)
class NativePath:
    """The path that repacks weights, printed by `marlin-moe doctor` and `repack`.

    Attributes:
        variant: the C loop's instruction set or the kernel's architecture; None where torch operations do it.
        reason: why they do, or None.
        loop: what has the variant: "C", or "CUDA kernel".
    """

    variant: str | None
    reason: str | None
    loop: str = "C"

    def __post_init__(self) -> None:
        if (self.variant is None) == (self.reason is None):
            raise ValueError(
                f"NativePath: expected a variant or a reason, got {self.variant!r} and {self.reason!r}"
            )

    @property
    def used(self) -> bool:
        """Is it the C loop or the kernel?"""
        return self.variant is not None

    def __str__(self) -> str:
        return f"{self.loop} ({self.variant})" if self.used else f"torch operations ({self.reason})"


def native_path(device: torch.device | str = "cpu") -> NativePath:
    """The path for tensors on `device`, as the environment variable MARLIN_MOE_NATIVE has it.

    Unset takes the C loop where it was built (on a CPU) or the kernel where it can be compiled (on a CUDA
    device), 0 never, 1 always. Tensors on other devices are repacked where they are, by torch operations.

    Raises:
        MarlinMoEError: MARLIN_MOE_NATIVE is neither 0 nor 1, or it is 1 and there is no C loop or no kernel.
    """
    switch = os.environ.get(SWITCH)
    if switch not in (None, "0", "1"):
        raise MarlinMoEError(
            f"{SWITCH}: expected 0 (torch operations), 1 (the C loop or the kernel, or an error) or no such "
            f"variable, got {switch!r}. Unset it to use the C loop or the kernel where there is one."
        )
    target = torch.device(device)
    if target.type not in ("cpu", "cuda"):
        reason = f"the tensors are on {target.type}, the C loop is for a CPU, the kernel for a CUDA device"
        return NativePath(variant=None, reason=reason)
    if switch == "0":
        return NativePath(variant=None, reason=f"{SWITCH}=0")
    found = _kernel(target) if target.type == "cuda" else _c_loop()
    if switch == "1" and not found.used:
        what, advice = ("C loop", BUILD_ADVICE) if target.type == "cpu" else ("kernel", INSTALL_ADVICE)
        raise MarlinMoEError(
            f"{SWITCH}=1: expected the {what} of weight repacking, but {found.reason}. {advice}"
        )
    return found


def _c_loop() -> NativePath:
    extension = load_extension()
    if isinstance(extension, str):
        return NativePath(variant=None, reason=extension)
    return NativePath(variant=extension.variants()[0], reason=None)


def _kernel(device: torch.device) -> NativePath:
    reason = reason_against_kernels(device)
    variant = architecture(device) if reason is None else None
    return NativePath(variant=variant, reason=reason, loop="CUDA kernel")


@functools.cache
def load_extension() -> ModuleType | str:
    """The extension module `_native`, or why there is none."""
    name = f"{__package__}._native"
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        return f"the C extension was not built: {error}"
    except ImportError as error:
        return f"the C extension does not load: {error}"
