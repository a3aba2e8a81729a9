"""A launch made ready once and repeated at little cost: `PreparedLaunch`, `pack_arguments`."""

import ctypes
import struct
import threading
from collections.abc import Callable, Sequence

from ..errors import DriverError
from .driver import DriverFunction, launch_failure

Dim = int | tuple[int, ...]
Argument = int | float | bytes | bytearray | memoryview | ctypes.Structure
COOPERATIVE = 2  # CU_LAUNCH_ATTRIBUTE_COOPERATIVE
PROGRAMMATIC = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
FLOAT_FORMATS = {4: "<f", 8: "<d"}


class LaunchAttribute(ctypes.Structure):
    """The driver's CUlaunchAttribute: 8 bytes of id, 64 of value."""

    _fields_ = (("id", ctypes.c_uint64), ("value", ctypes.c_uint64 * 8))


class LaunchConfig(ctypes.Structure):
    """The driver's CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("smem_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("num_attributes", ctypes.c_uint),
    )


class PreparedLaunch:
    """One kernel with its grid, block and shared memory; a call gives the stream and the parameters.

    Everything that the driver reads lies at fixed addresses, so a call copies the parameters, stores the
    stream and makes one foreign call. Threads may share it. The device must be the current one.
    """

    __slots__ = (
        "_addresses",
        "_arguments",
        "_attributes",
        "_buffer",
        "_call",
        "_config",
        "_function",
        "_lock",
        "_view",
        "parameter_bytes",
    )

    def __init__(
        self,
        call: Callable[..., int],
        function: DriverFunction,
        *,
        grid: Dim,
        block: Dim,
        smem_bytes: int,
        cooperative: bool,
        programmatic: bool = False,
    ) -> None:
        self.parameter_bytes = max((offset + size for offset, size in function.parameters), default=0)
        self._function = function  # its library must outlive the launches
        self._call = call
        self._lock = threading.Lock()
        self._buffer = ctypes.create_string_buffer(max(self.parameter_bytes, 1))
        self._view = memoryview(self._buffer).cast("B")[: self.parameter_bytes]
        start = ctypes.addressof(self._buffer)
        addresses = [start + offset for offset, _ in function.parameters]
        self._addresses = (ctypes.c_void_p * max(len(addresses), 1))(*addresses)
        wanted = [COOPERATIVE] * cooperative + [PROGRAMMATIC] * programmatic
        self._attributes = (LaunchAttribute * max(len(wanted), 1))()
        for attribute, number in zip(self._attributes, wanted, strict=False):
            attribute.id, attribute.value[0] = number, 1
        self._config = LaunchConfig(
            grid=_three(grid, "grid"),
            block=_three(block, "block"),
            smem_bytes=smem_bytes,
            attributes=ctypes.addressof(self._attributes),
            num_attributes=len(wanted),
        )
        self._arguments = (
            ctypes.byref(self._config),
            ctypes.c_void_p(function.handle),
            self._addresses,
            ctypes.c_void_p(),
        )

    def __call__(self, stream: int, parameters: bytes | bytearray | memoryview) -> None:
        """Launches on a stream.

        Args:
            stream: a CUstream, as `torch.cuda.current_stream().cuda_stream`.
            parameters: `parameter_bytes` bytes: the parameters at their offsets.

        Raises:
            DriverError: the number of bytes is not the kernel's, or the driver refuses the launch.
        """
        with self._lock:  # the driver has read everything when the call returns
            try:
                self._view[:] = parameters
            except ValueError as error:
                raise self._misfit(len(parameters)) from error
            self._config.stream = stream
            code = self._call(*self._arguments)
        if code:
            raise launch_failure(code, self._function.name)

    def _misfit(self, found: int) -> DriverError:
        return DriverError(
            f"{self._function.name}: expected {self.parameter_bytes} bytes of parameters, because the kernel "
            f"takes (offset, size) {list(self._function.parameters)}, got {found}."
        )


def pack_arguments(function: DriverFunction, arguments: Sequence[Argument]) -> bytes:
    """A kernel's parameters as bytes at their offsets.

    An int becomes an integer or a pointer of the parameter's size, a bool one of 0 or 1, a float a float or a
    double; bytes and ctypes structures are taken as they are.

    Raises:
        DriverError: the number of arguments, or the size of one, is not the kernel's.
        TypeError: an argument is of another type.
    """
    if len(arguments) != len(function.parameters):
        raise DriverError(
            f"{function.name}: expected {len(function.parameters)} arguments, got {len(arguments)}."
        )
    packed = bytearray()
    for number, (argument, (offset, size)) in enumerate(zip(arguments, function.parameters, strict=True)):
        packed += bytes(offset - len(packed))
        data = _argument_bytes(argument, size)
        if data is None or len(data) != size:
            found = f"{argument!r}" if data is None else f"{len(data)} bytes"
            raise DriverError(
                f"{function.name}: argument {number}: expected one of {size} bytes, got {found}."
            )
        packed += data
    return bytes(packed)


def _argument_bytes(argument: Argument, size: int) -> bytes | None:
    """The argument's bytes; None where it does not fit a parameter of that size."""
    if isinstance(argument, int):
        try:
            return argument.to_bytes(size, "little", signed=argument < 0)
        except OverflowError:
            return None
    if isinstance(argument, float):
        return struct.pack(FLOAT_FORMATS[size], argument) if size in FLOAT_FORMATS else None
    if isinstance(argument, bytes | bytearray | memoryview | ctypes.Structure):
        return bytes(argument)
    raise TypeError(f"kernel argument: expected int, float, bytes or a ctypes structure, got {argument!r}.")


def _three(dim: Dim, name: str) -> tuple[int, int, int]:
    sizes = (dim,) if isinstance(dim, int) else tuple(dim)
    if not 1 <= len(sizes) <= 3 or not all(0 < size < 2**31 for size in sizes):
        raise DriverError(f"{name}: expected one to three sizes above 0, got {dim!r}.")
    x, y, z = (*sizes, 1, 1)[:3]
    return x, y, z
