"""The devices that a user may name: a str, an int or a torch.device -> one that this process can use."""

import torch

from .errors import MarlinMoEError


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
