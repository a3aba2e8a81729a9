"""The calls into the CUDA driver; all of them need a GPU. Devices are ordinals, as in torch."""

import ctypes
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ..errors import DriverError
from .toolkit import import_cuda

PLAIN_SMEM_BYTES = 48 * 1024  # more of dynamic shared memory has to be asked for


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DriverFunction:
    """A kernel in the primary context of a device.

    Fields:
        name: what errors call it.
        device: the device's ordinal.
        kernel: cuda.core's Kernel, which keeps the loaded library alive.
        handle: its CUfunction.
        parameters: (offset, size) in bytes of every parameter.
        max_smem_bytes: the most dynamic shared memory of a block.
        num_sms: the device's multiprocessors.
    """

    name: str
    device: int
    kernel: Any
    handle: int
    parameters: tuple[tuple[int, int], ...]
    max_smem_bytes: int
    num_sms: int


def load_function(cubin: bytes, symbol: str, *, name: str, device: int) -> DriverFunction:
    """Loads a cubin and readies its code on the device, also while a stream of the thread is captured.

    Raises:
        DriverError: the driver refuses, for instance a cubin of another architecture.
    """
    core, driver = import_cuda("cuda.core"), import_cuda("cuda.bindings.driver")
    attribute, query = driver.CUdevice_attribute, driver.cuDeviceGetAttribute
    with _primary_context(device, name):
        try:
            kernel = core.ObjectCode.from_cubin(cubin, name=name).get_kernel(symbol)
        except Exception as error:  # cuda.core's own types are private and change
            raise DriverError(
                f"{name}: expected device {device} to load its cubin, got {type(error).__name__}: {error}"
            ) from error
        # Lazy loading would put the code on the device at the first launch, where a capture forbids it.
        function = checked(driver.cuKernelGetFunction(kernel.handle), name)
        optin = checked(query(attribute.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, device), name)
        num_sms = checked(query(attribute.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, device), name)
        static = checked(
            driver.cuFuncGetAttribute(
                driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, function
            ),
            name,
        )
        return DriverFunction(
            name=name,
            device=device,
            kernel=kernel,
            handle=int(function),
            parameters=tuple((info.offset, info.size) for info in kernel.arguments_info),
            max_smem_bytes=optin - static,
            num_sms=num_sms,
        )


def allow_dynamic_smem(function: DriverFunction, smem_bytes: int) -> None:
    """Lets blocks have that much dynamic shared memory, and all that the device has, from now on.

    Raises:
        DriverError: the device has less.
    """
    if not 0 <= smem_bytes <= function.max_smem_bytes:
        raise DriverError(
            f"{function.name}: expected at most {function.max_smem_bytes:,} bytes of dynamic shared memory, "
            f"because device {function.device} has no more for a block, got {smem_bytes:,}."
        )
    if smem_bytes <= PLAIN_SMEM_BYTES:
        return
    driver = import_cuda("cuda.bindings.driver")
    limit = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    answer = driver.cuKernelSetAttribute(
        limit, function.max_smem_bytes, function.kernel.handle, function.device
    )
    checked(answer, function.name)


def max_blocks_per_sm(function: DriverFunction, threads: int, smem_bytes: int) -> int:
    """How many blocks of that many threads and bytes of dynamic shared memory one multiprocessor holds."""
    driver = import_cuda("cuda.bindings.driver")
    with _primary_context(function.device, function.name):
        handle = driver.CUfunction(function.handle)
        answer = driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(handle, threads, smem_bytes)
    return int(checked(answer, function.name))


@functools.lru_cache(maxsize=1)
def launch_kernel_ex() -> Callable[..., int]:
    """`cuLaunchKernelEx(config*, function, parameters**, extra**)` as ctypes calls it.

    Straight from the driver's library: four pointers that are ready before the call cost less than the
    conversions of a binding.

    Raises:
        DriverError: there is no CUDA driver.
    """
    try:
        entry: Callable[..., int] = ctypes.CDLL("libcuda.so.1").cuLaunchKernelEx
    except (OSError, AttributeError) as error:
        raise DriverError(f"libcuda.so.1: expected an NVIDIA driver of CUDA 13, got: {error}.") from error
    return entry


def launch_failure(code: int, name: str) -> DriverError:
    """The error for what `cuLaunchKernelEx` returned."""
    driver = import_cuda("cuda.bindings.driver")
    return DriverError(
        f"{name}: expected the driver to launch it, got {_describe(driver, driver.CUresult(code))}."
    )


def checked(answer: tuple[Any, ...], name: str) -> Any:
    """The value of a driver call.

    Raises:
        DriverError: the call failed.
    """
    driver = import_cuda("cuda.bindings.driver")
    if answer[0] != driver.CUresult.CUDA_SUCCESS:
        raise DriverError(f"{name}: expected the CUDA driver to succeed, got {_describe(driver, answer[0])}.")
    return answer[1] if len(answer) > 1 else None


def _describe(driver: Any, code: Any) -> str:
    failed, text = driver.cuGetErrorString(code)
    return f"{code.name} ({text.decode()})" if failed == driver.CUresult.CUDA_SUCCESS else repr(code)


@functools.lru_cache(maxsize=64)
def _retained_context(device: int) -> Any:
    """The device's primary context, the one that torch uses; kept until the process ends."""
    driver = import_cuda("cuda.bindings.driver")
    name = f"device {device}"
    try:
        checked(driver.cuInit(0), name)
        return checked(driver.cuDevicePrimaryCtxRetain(checked(driver.cuDeviceGet(device), name)), name)
    except DriverError:
        raise
    except RuntimeError as error:  # the driver's library cannot be loaded
        raise DriverError(
            f"{name}: expected a CUDA driver to run kernels with, got: {error}. Run on a machine with an "
            "NVIDIA GPU and its driver, or on the CPU with backend='reference'."
        ) from error


@contextmanager
def _primary_context(device: int, name: str) -> Iterator[None]:
    """Makes it current for a while, and lets calls that a capture would forbid pass: they touch no stream."""
    driver = import_cuda("cuda.bindings.driver")
    relaxed = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    checked(driver.cuCtxPushCurrent(_retained_context(device)), name)
    try:
        before = checked(driver.cuThreadExchangeStreamCaptureMode(relaxed), name)
        try:
            yield
        finally:
            checked(driver.cuThreadExchangeStreamCaptureMode(before), name)
    finally:
        checked(driver.cuCtxPopCurrent(), name)
