"""Repacking kernels without a GPU: their sources run on a CPU against the oracle, and compiled."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from compare_layer import equal_bytes
from kernels_on_cpu import COMPILER, HostKernels
from marlin_moe.kernels.jit.build import compile_all
from marlin_moe.kernels.jit.toolkit import installed_toolkit
from marlin_moe.kernels.layout import pack_qweight, pack_zero_points, permute_scales
from marlin_moe.repack.native import cuda_repack
from marlin_moe.repack.native.cuda_repack import (
    PERMUTE_KERNELS,
    WEIGHT_KERNELS,
    build_specs,
    pack_on_device,
    pack_zero_points_on_device,
    permute_scales_on_device,
    unpack_on_device,
)
from oracle_marlin import marlin_qweight

GUARD = 0x5A5A5A5A
MAX_REGISTERS = 48


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> HostKernels:
    if COMPILER is None:
        pytest.skip("no C++ compiler")
    return HostKernels(build_specs("sm_90a"), tmp_path_factory.mktemp("kernels"))


@pytest.fixture
def host(compiled: HostKernels, monkeypatch: pytest.MonkeyPatch) -> Iterator[HostKernels]:
    """Launches go to the CPU."""

    def launch(
        spec: object, kernel: str, blocks: int, arguments: tuple[int, ...], tensor: torch.Tensor
    ) -> None:
        assert tensor.device.type == "cpu"
        compiled.launch(kernel, blocks, arguments)

    monkeypatch.setattr(cuda_repack, "_launch", launch)
    monkeypatch.setattr(cuda_repack, "architecture", lambda device: "sm_90a")
    compiled.launched.clear()
    yield compiled
    assert compiled.launched


def random_words(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**31), 2**31, shape, dtype=torch.int32, generator=generator)


def oracle_qweight(weight_packed: torch.Tensor, bits: int) -> torch.Tensor:
    values = weight_packed.contiguous().view(torch.uint8)
    if bits == 4:
        values = torch.stack((values & 15, values >> 4), dim=-1).flatten(-2)
    return torch.stack([marlin_qweight(matrix, bits) for matrix in values])


@pytest.mark.parametrize("k", [16, 48, 64, 256, 272, 320, 1040])
@pytest.mark.parametrize("bits", [4, 8])
def test_weights_and_back(host: HostKernels, bits: int, k: int) -> None:
    experts, n = 2, 128
    weight_packed = random_words(experts, n, k * bits // 32, seed=k)
    out = torch.full((experts, k // 16, n * bits // 2), GUARD, dtype=torch.int32)
    pack_on_device(weight_packed, out, bits=bits)
    equal_bytes(out, oracle_qweight(weight_packed, bits), f"qweight, {bits} bits, K = {k}")
    back = torch.full_like(weight_packed, GUARD)
    unpack_on_device(out, back, bits=bits)
    equal_bytes(back, weight_packed, f"back, {bits} bits, K = {k}")
    vector = "true" if weight_packed.shape[2] % 4 == 0 else "false"
    assert host.launched == [f"{name}_qweight<{bits}, {vector}>" for name in ("pack", "unpack")]


@pytest.mark.parametrize(("shift", "vector"), [(4, "true"), (1, "false"), (2, "false")])
@pytest.mark.parametrize("bits", [4, 8])
def test_slices_of_larger_tensors(host: HostKernels, bits: int, shift: int, vector: str) -> None:
    """Nothing around the destination changes, and the source is only read."""
    words, rows = 40, 40 * 2 // bits
    whole = random_words(5, 150, words + 8)
    weight_packed = whole[1:4:2, 3:131, shift : shift + words]
    around = torch.full((3, rows + 2, 64 * bits + 8), GUARD, dtype=torch.int32)
    untouched, before = around.clone(), whole.clone()
    untouched[1:, 1:-1, 4:-4] = oracle_qweight(weight_packed, bits)
    pack_on_device(weight_packed, around[1:, 1:-1, 4:-4], bits=bits)
    equal_bytes(around, untouched, "packed")
    target = torch.full_like(whole, GUARD)
    expected = target.clone()
    expected[1:4:2, 3:131, shift : shift + words] = weight_packed
    unpack_on_device(around[1:, 1:-1, 4:-4], target[1:4:2, 3:131, shift : shift + words], bits=bits)
    equal_bytes(target, expected, "unpacked")
    equal_bytes(whole, before, "source")
    assert {name.split(", ")[1] for name in host.launched} == {f"{vector}>"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("groups", [1, 2, 6, 64, 130])
def test_scales(host: HostKernels, groups: int, dtype: torch.dtype) -> None:
    scales = random_words(2, 192, groups + 3).float().to(dtype)[..., 1 : groups + 1]
    around = torch.zeros((2, groups + 2, 192), dtype=dtype)
    expected = around.clone()
    expected[:, 1:-1] = permute_scales(scales)
    permute_scales_on_device(scales, around[:, 1:-1])
    equal_bytes(around, expected, "scales")


@pytest.mark.parametrize("groups", [1, 5, 70])
@pytest.mark.parametrize("bits", [4, 8])
def test_zero_points(host: HostKernels, bits: int, groups: int) -> None:
    zeros = random_words(3, groups, 192 * bits // 32).transpose(1, 2)
    around = torch.full((3, groups + 1, zeros.shape[1]), GUARD, dtype=torch.int32)
    expected = around.clone()
    expected[:, 1:] = pack_zero_points(zeros, bits=bits)
    pack_zero_points_on_device(zeros, around[:, 1:], bits=bits)
    equal_bytes(around, expected, "zero points")


@pytest.mark.parametrize("bits", [4, 8])
def test_nothing_to_do_launches_nothing(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_repack, "architecture", lambda device: "sm_90a")
    out = torch.empty(0, 2, 64 * bits // 2, dtype=torch.int32)
    assert pack_on_device(torch.empty(0, 64, bits, dtype=torch.int32), out, bits=bits) is out


def test_the_oracle_agrees_with_the_torch_path() -> None:
    weight_packed = random_words(1, 64, 8)
    equal_bytes(pack_qweight(weight_packed, bits=4), oracle_qweight(weight_packed, 4), "torch")


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120a"])
def test_compiles_without_spills(arch: str) -> None:
    known = installed_toolkit().compute_capabilities
    if int(arch.removeprefix("sm_").removesuffix("a")) not in known:
        pytest.skip(f"NVRTC here knows {known}")
    reports = compile_all(build_specs(arch), cache=False)
    for report in reports:
        assert (report.spill_store_bytes, report.spill_load_bytes, report.warnings) == (0, 0, ()), report.name
        assert report.registers <= MAX_REGISTERS, report.name
    assert len(WEIGHT_KERNELS) + len(PERMUTE_KERNELS) == 14
