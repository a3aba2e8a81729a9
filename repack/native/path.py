"""Which path repacks weights: the C loop or torch operations. Both give the same bytes."""

import functools
import importlib
import os
from dataclasses import dataclass
from types import ModuleType

import torch

from ...kernels.errors import MarlinMoEError

SWITCH = "MARLIN_MOE_NATIVE"
BUILD_ADVICE = "Install a C compiler and the package again, or unset the variable to use torch operations."


@dataclass(frozen=True, slots=True, kw_only=True)
class NativePath:
    """The path that repacks weights: `variant` of the C loop, or None and the `reason` why torch does it.

    Printed by `marlin-moe doctor` and `repack`.
    """

    variant: str | None
    reason: str | None

    def __post_init__(self) -> None:
        if (self.variant is None) == (self.reason is None):
            raise ValueError(
                f"NativePath: expected a variant or a reason, got {self.variant!r} and {self.reason!r}"
            )

    @property
    def used(self) -> bool:
        """Is it the C loop?"""
        return self.variant is not None

    def __str__(self) -> str:
        return f"C ({self.variant})" if self.used else f"torch operations ({self.reason})"


def native_path(device: torch.device | str = "cpu") -> NativePath:
    """The path for tensors on `device`, as the environment variable MARLIN_MOE_NATIVE has it.

    Unset takes the C loop where it was built, 0 never, 1 always on a CPU. Tensors on other devices are
    repacked where they are, by torch operations.

    Raises:
        MarlinMoEError: MARLIN_MOE_NATIVE is neither 0 nor 1, or it is 1 and there is no C loop.
    """
    switch = os.environ.get(SWITCH)
    if switch not in (None, "0", "1"):
        raise MarlinMoEError(
            f"{SWITCH}: expected 0 (torch operations), 1 (the C loop, or an error) or no such variable, "
            f"got {switch!r}. Unset it to use the C loop where there is one."
        )
    kind = torch.device(device).type
    if kind != "cpu":
        return NativePath(variant=None, reason=f"the tensors are on {kind}, the C loop is for a CPU")
    if switch == "0":
        return NativePath(variant=None, reason=f"{SWITCH}=0")
    found = load_extension()
    if isinstance(found, ModuleType):
        return NativePath(variant=found.variants()[0], reason=None)
    if switch == "1":
        raise MarlinMoEError(
            f"{SWITCH}=1: expected the C loop of weight repacking, but {found}. {BUILD_ADVICE}"
        )
    return NativePath(variant=None, reason=found)


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
