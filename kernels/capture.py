"""Calls of the driver that a capture would forbid, and that touch no stream: `calls_allowed_in_capture`."""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from .errors import DriverError

RELAXED = 2
"""CU_STREAM_CAPTURE_MODE_RELAXED, and HIP's."""


@contextmanager
def calls_allowed_in_capture() -> Iterator[None]:
    """Lets this thread load kernels while a stream of it is captured; does nothing outside of captures."""
    if not torch.cuda.is_current_stream_capturing():
        yield
        return
    before = _exchange(RELAXED)
    try:
        yield
    finally:
        _exchange(before)


def _exchange(mode: int) -> int:
    """Sets the calling thread's mode of captures; the one before."""
    if torch.version.hip:
        exchange = ctypes.CDLL("libamdhip64.so").hipThreadExchangeStreamCaptureMode
    else:
        exchange = ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode
    value = ctypes.c_int(mode)
    code = exchange(ctypes.byref(value))
    if code:
        raise DriverError(
            f"capture: expected the driver to let kernels be loaded, got its error {code}. Call the layer "
            "once before the capture."
        )
    return value.value
