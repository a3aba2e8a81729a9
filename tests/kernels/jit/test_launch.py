"""What the driver would be handed, seen by a function in its place."""

import ctypes
import struct
import threading
import time
from collections import Counter
from typing import Any

import pytest
from cuda.bindings import driver

from marlin_moe.kernels.errors import DriverError
from marlin_moe.kernels.jit.driver import DriverFunction
from marlin_moe.kernels.jit.launch import LaunchAttribute, LaunchConfig, PreparedLaunch, pack_arguments

SIGNATURE = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 4)


def function(*parameters: tuple[int, int]) -> DriverFunction:
    return DriverFunction(
        name="k", device=0, kernel=None, handle=77, parameters=parameters, max_smem_bytes=1 << 17, num_sms=4
    )


class FakeDriver:
    """Records each launch as the driver's own structure and the parameters' bytes."""

    def __init__(self, sizes: list[int], pause_s: float = 0) -> None:
        self.launches: list[dict[str, Any]] = []
        self.sizes, self.pause_s = sizes, pause_s
        self.entry = SIGNATURE(self.launch)

    def launch(self, config: int, handle: int, parameters: int, extra: int | None) -> int:
        time.sleep(self.pause_s)  # others may run now
        seen = driver.CUlaunchConfig(config)
        addresses = (ctypes.c_void_p * len(self.sizes)).from_address(parameters)
        pairs = zip(addresses, self.sizes, strict=True)
        self.launches.append(
            {
                "grid": (seen.gridDimX, seen.gridDimY, seen.gridDimZ),
                "block": (seen.blockDimX, seen.blockDimY, seen.blockDimZ),
                "smem_bytes": seen.sharedMemBytes,
                "stream": LaunchConfig.from_address(config).stream,
                "num_attributes": seen.numAttrs,
                "attributes": LaunchConfig.from_address(config).attributes,
                "handle": handle,
                "extra": extra,
                "parameters": [ctypes.string_at(address or 0, size) for address, size in pairs],
            }
        )
        return 0


@pytest.mark.parametrize("cooperative", [False, True])
def test_the_driver_sees_shape_stream_and_parameters(cooperative: bool) -> None:
    fake = FakeDriver([24, 4])
    launch = PreparedLaunch(
        fake.entry,
        function((0, 24), (24, 4)),
        grid=(132, 2),
        block=256,
        smem_bytes=70_000,
        cooperative=cooperative,
    )
    assert launch.parameter_bytes == 28
    for stream, number in ((0, 5), (2**47 + 16, 6)):
        launch(stream, struct.pack("<3qi", 1, 2, 3, number))
    first, second = fake.launches
    assert first["grid"] == (132, 2, 1)
    assert first["block"] == (256, 1, 1)
    assert first["smem_bytes"] == 70_000
    assert first["num_attributes"] == int(cooperative)
    assert first["handle"] == 77
    assert first["extra"] is None
    assert [first["stream"] or 0, second["stream"]] == [0, 2**47 + 16]
    assert first["parameters"] == [struct.pack("<3q", 1, 2, 3), struct.pack("<i", 5)]
    assert second["parameters"][1] == struct.pack("<i", 6)


@pytest.mark.parametrize("programmatic", [False, True])
@pytest.mark.parametrize("cooperative", [False, True])
def test_the_attributes_are_the_drivers(cooperative: bool, programmatic: bool) -> None:
    fake = FakeDriver([])
    launch = PreparedLaunch(
        fake.entry,
        function(),
        grid=1,
        block=1,
        smem_bytes=0,
        cooperative=cooperative,
        programmatic=programmatic,
    )
    launch(0, b"")
    seen = fake.launches[0]
    ids = driver.CUlaunchAttributeID
    found = {}
    for number in range(seen["num_attributes"]):
        attribute = driver.CUlaunchAttribute(seen["attributes"] + number * ctypes.sizeof(LaunchAttribute))
        if attribute.id == ids.CU_LAUNCH_ATTRIBUTE_COOPERATIVE:
            found["cooperative"] = attribute.value.cooperative
        if attribute.id == ids.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION:
            found["programmatic"] = attribute.value.programmaticStreamSerializationAllowed
    assert seen["num_attributes"] == cooperative + programmatic
    assert found == dict.fromkeys(["cooperative"] * cooperative + ["programmatic"] * programmatic, 1)


@pytest.mark.parametrize("nbytes", [0, 27, 29])
def test_parameters_of_another_size_are_refused(nbytes: int) -> None:
    fake = FakeDriver([24, 4])
    launch = PreparedLaunch(
        fake.entry, function((0, 24), (24, 4)), grid=1, block=1, smem_bytes=0, cooperative=False
    )
    with pytest.raises(DriverError, match=rf"k: expected 28 bytes of parameters.*got {nbytes}"):
        launch(0, bytes(nbytes))
    assert fake.launches == []


def test_threads_share_a_launch_without_mixing_parameters() -> None:
    fake = FakeDriver([8], pause_s=0.0005)
    launch = PreparedLaunch(fake.entry, function((0, 8)), grid=1, block=1, smem_bytes=0, cooperative=False)

    def repeat(number: int) -> None:
        for _ in range(50):
            launch(number, struct.pack("<q", number))

    threads = [threading.Thread(target=repeat, args=(number,)) for number in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert Counter(seen["stream"] for seen in fake.launches) == {1: 50, 2: 50, 3: 50}
    assert all(seen["parameters"] == [struct.pack("<q", seen["stream"])] for seen in fake.launches)


@pytest.mark.parametrize("grid", [0, (1, 0), (1, 1, 1, 1), (), 2**31])
def test_a_grid_has_one_to_three_sizes(grid: Any) -> None:
    with pytest.raises(DriverError, match="grid: expected one to three sizes above 0"):
        PreparedLaunch(FakeDriver([]).entry, function(), grid=grid, block=1, smem_bytes=0, cooperative=False)


def test_arguments_are_packed_at_their_offsets() -> None:
    class Pair(ctypes.Structure):
        _fields_ = (("a", ctypes.c_int), ("b", ctypes.c_int))

    packed = pack_arguments(
        function((0, 8), (8, 4), (16, 8), (24, 1), (28, 4), (32, 8)),
        [2**63, -1, 1.5, True, 0.5, Pair(a=3, b=4)],
    )
    expected = struct.pack("<Qi4xdB3xf2i", 2**63, -1, 1.5, 1, 0.5, 3, 4)
    assert packed == expected


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ([1], DriverError, "k: expected 2 arguments, got 1"),
        ([1, 2**31 * 2], DriverError, "k: argument 1: expected one of 4 bytes, got 4294967296"),
        ([b"1234567", 0], DriverError, "k: argument 0: expected one of 8 bytes, got 7 bytes"),
        (["x", 0], TypeError, "expected int, float, bytes or a ctypes structure, got 'x'"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(
    arguments: list[Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        pack_arguments(function((0, 8), (8, 4)), arguments)


def test_a_float_for_a_two_byte_parameter_is_refused() -> None:
    with pytest.raises(DriverError, match=r"argument 0: expected one of 2 bytes, got 1\.0"):
        pack_arguments(function((0, 2)), [1.0])
