"""Loading and launching on a GPU, and what is refused without one."""

import statistics
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from marlin_moe.kernels.errors import DriverError, JitError
from marlin_moe.kernels.jit import load as load_module
from marlin_moe.kernels.jit.load import LoadedKernel, load_kernel
from marlin_moe.kernels.jit.source import KernelSource
from marlin_moe.kernels.jit.spec import BuildSpec
from tiny_kernel import tiny_spec, write_tiny

BARRIER = """\
#include <cooperative_groups.h>

extern "C" __global__ void meet(int* arrived, int* seen) {
  extern __shared__ int shared[];
  shared[threadIdx.x] = 0;
  if (threadIdx.x == 0) atomicAdd(arrived, 1);
  cooperative_groups::this_grid().sync();
  if (threadIdx.x == 0) seen[blockIdx.x] = atomicAdd(arrived, 0) + shared[0];
}
"""
HOST_US_PER_LAUNCH = 12.0


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MARLIN_MOE_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("MARLIN_MOE_JIT", raising=False)
    monkeypatch.setattr(load_module, "_loaded", {})


def here() -> str:
    """The architecture of the current device."""
    major, minor = torch.cuda.get_device_capability()
    return f"sm_{major}{minor}" + ("a" if major >= 9 else "")


def device_spec(root: Path, name: str = "tiny.cu", kernels: tuple[str, ...] = ("tiny",)) -> BuildSpec:
    write_tiny(root)
    (root / "meet.cu").write_text(BARRIER)
    return tiny_spec(root, source=KernelSource(name=name, root=root), kernels=kernels, arch=here())


def tiny_parameters(x: torch.Tensor, y: torch.Tensor, offset: int) -> bytes:
    return struct.pack("<QQqi", x.data_ptr(), y.data_ptr(), x.numel(), offset)


def stream() -> int:
    return torch.cuda.current_stream().cuda_stream


def test_a_cpu_and_a_kernel_that_the_spec_has_not_are_refused(tmp_path: Path) -> None:
    spec = tiny_spec(write_tiny(tmp_path))
    with pytest.raises(JitError, match="device: expected a CUDA device to load a kernel on, got cpu"):
        load_kernel(spec, "cpu")
    with pytest.raises(JitError, match="kernel: expected one of tiny, got 'gone'"):
        load_kernel(spec, 0, kernel="gone")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a driver")
def test_without_a_driver_the_error_says_so(tmp_path: Path) -> None:
    with pytest.raises(DriverError, match="device 0: expected a CUDA driver to run kernels with"):
        load_kernel(tiny_spec(write_tiny(tmp_path)), 0)


@pytest.mark.gpu
def test_prepared_and_single_launches_compute(tmp_path: Path) -> None:
    kernel = load_kernel(device_spec(tmp_path), "cuda")
    assert kernel.function.parameters == ((0, 24), (24, 4))
    x = torch.arange(1000, dtype=torch.float32, device="cuda")
    y = torch.full_like(x, -1)
    kernel.prepare(grid=4, block=256)(stream(), tiny_parameters(x, y, 7))
    torch.testing.assert_close(y, 2 * (x + 1) + 3 * 7, rtol=0, atol=0)
    arguments = struct.pack("<QQq", x.data_ptr(), y.data_ptr(), x.numel())
    kernel.launch((4, 1), (256,), 0, stream(), [arguments, -2])
    torch.testing.assert_close(y, 2 * (x + 1) - 3 * 2, rtol=0, atol=0)


@pytest.mark.gpu
def test_a_template_kernel_by_its_expression(tmp_path: Path) -> None:
    spec = device_spec(tmp_path, kernels=("tiny", "fill<7>"))
    y = torch.zeros(32, device="cuda")
    load_kernel(spec, y.device, kernel="fill<7>").launch(1, 32, 0, stream(), [y.data_ptr()])
    assert y.tolist() == [7.0] * 32


@pytest.mark.gpu
def test_a_cooperative_launch_with_much_shared_memory_meets(tmp_path: Path) -> None:
    kernel = load_kernel(device_spec(tmp_path, "meet.cu", ("meet",)), "cuda")
    smem_bytes = 60 * 1024
    blocks = kernel.max_cooperative_blocks(128, smem_bytes)
    assert blocks >= kernel.function.num_sms
    arrived = torch.zeros(1, dtype=torch.int32, device="cuda")
    seen = torch.zeros(blocks, dtype=torch.int32, device="cuda")
    parameters = struct.pack("<QQ", arrived.data_ptr(), seen.data_ptr())
    kernel.prepare(grid=blocks, block=128, smem_bytes=smem_bytes, cooperative=True)(stream(), parameters)
    assert set(seen.tolist()) == {blocks}
    with pytest.raises(DriverError, match=rf"at most {blocks} blocks.*got {blocks + 1}"):
        kernel.prepare(grid=blocks + 1, block=128, smem_bytes=smem_bytes, cooperative=True)
    with pytest.raises(DriverError, match=r"bytes of dynamic shared memory.*got 10,000,000"):
        kernel.prepare(grid=1, block=128, smem_bytes=10_000_000)


@pytest.mark.gpu
@pytest.mark.parametrize("cooperative", [False, True])
def test_loading_and_launching_inside_a_capture(tmp_path: Path, cooperative: bool) -> None:
    spec = device_spec(tmp_path)
    x = torch.arange(256, dtype=torch.float32, device="cuda")
    y = torch.zeros_like(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch = load_kernel(spec, "cuda").prepare(grid=1, block=256, cooperative=cooperative)
        launch(stream(), tiny_parameters(x, y, 1))
    assert y.count_nonzero().item() == 0
    for _ in range(2):
        y.zero_()
        graph.replay()
        torch.testing.assert_close(y, 2 * (x + 1) + 3, rtol=0, atol=0)


@pytest.mark.gpu
def test_a_kernel_is_loaded_once_by_many_threads(tmp_path: Path) -> None:
    spec = device_spec(tmp_path)
    together = threading.Barrier(4)

    def load(_: int) -> LoadedKernel:
        together.wait()
        return load_kernel(spec, 0)

    with ThreadPoolExecutor(4) as pool:
        kernels = set(pool.map(load, range(4)))
    assert len(kernels) == 1
    assert load_kernel(spec, "cuda:0") in kernels


@pytest.mark.gpu
def test_the_current_device_and_context_stay(tmp_path: Path) -> None:
    last = torch.cuda.device_count() - 1
    before = torch.cuda.current_device()
    kernel = load_kernel(device_spec(tmp_path), last)
    assert kernel.max_blocks_per_sm(256) >= 1
    assert torch.cuda.current_device() == before


@pytest.mark.gpu
def test_a_cubin_of_another_architecture_and_a_bad_launch_are_errors(tmp_path: Path) -> None:
    spec = device_spec(tmp_path)
    wrong = "sm_90a" if here() != "sm_90a" else "sm_120a"
    with pytest.raises(DriverError, match="expected device 0 to load its cubin"):
        load_kernel(tiny_spec(tmp_path, arch=wrong), 0)
    with pytest.raises(DriverError, match=r"expected the driver to launch it, got CUDA_ERROR_INVALID_VALUE"):
        load_kernel(spec, 0).prepare(grid=1, block=2048)(stream(), bytes(28))


@pytest.mark.gpu
@pytest.mark.parametrize("cooperative", [False, True])
def test_a_launch_costs_the_host_little(tmp_path: Path, cooperative: bool) -> None:
    launch = load_kernel(device_spec(tmp_path), "cuda").prepare(grid=1, block=256, cooperative=cooperative)
    x = torch.zeros(256, device="cuda")
    parameters, current = tiny_parameters(x, x, 0), stream()
    times_us = []
    for _ in range(20):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(100):
            launch(current, parameters)
        times_us.append((time.perf_counter() - start) * 1e4)
    median_us = statistics.median(times_us)
    print(f"host time per launch: {median_us:.2f} us, cooperative={cooperative}")
    assert median_us < HOST_US_PER_LAUNCH
