"""The Triton backend's kernels by the real compiler, without a GPU; test_on_triton.py runs them."""

import re
import subprocess
from collections.abc import Iterator

import pytest
import torch
import triton

from moe_cases import MoECase
from triton_targets import SMEM_BYTES, TARGETS, compile_call

LAUNCHES = ["count_rows", "place_rows", "first_gemm", "second_gemm", "add_slots"]
SMALL = {"num_experts": 4, "hidden_size": 256, "padded_intermediate_size": 128, "top_k": 2}
CASES = {
    "decode": MoECase(**SMALL, tokens=1),
    "some tokens": MoECase(**SMALL, tokens=40, symmetric=False, biased=True, activation="swiglu_oai"),
    "prefill": MoECase(**SMALL, tokens=200, dtype=torch.float16, group_size=None, symmetric=False),
    "int8": MoECase(**SMALL, tokens=9, bits=8, group_size=128, w2_group_size=64, expert_map="ranks"),
    "int8 act-order": MoECase(
        **SMALL, tokens=90, bits=8, symmetric=False, act_order=True, dtype=torch.float16, activation="situ"
    ),
    "ungated": MoECase(
        num_experts=5,
        hidden_size=192,
        padded_intermediate_size=192,
        tokens=300,
        w2_bits=8,
        activation="relu2",
        on_input=True,
        ids_dtype=torch.int32,
        weights_in_x_dtype=True,
        view="columns",
    ),
}
MOST_SPILLED = 8
"""Bytes of a thread: two numbers, of one case on sm_80, where it has 128 registers."""


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        yield


@pytest.mark.parametrize("arch", TARGETS)
@pytest.mark.parametrize("name", CASES)
def test_calls_compile(name: str, arch: str) -> None:
    kernels = compile_call(CASES[name], TARGETS[arch])
    assert [kernel.metadata.name for kernel in kernels] == LAUNCHES
    for kernel in kernels:
        assert kernel.metadata.shared <= SMEM_BYTES[arch], kernel.metadata
    if arch == "gfx942":
        spilled = re.findall(r"vgpr_spill_count: +(\d+)", "".join(k.asm["amdgcn"] for k in kernels))
        assert {*spilled} == {"0"}
    elif arch == "sm_90":  # weights go from registers into wgmma
        assert all("wgmma.mma_async" in kernel.asm["ptx"] for kernel in kernels[2:4])


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
@pytest.mark.parametrize("name", CASES)
def test_hardly_anything_spills(name: str, arch: str) -> None:
    suffix = "a" if arch == "sm_90" else ""
    for kernel in compile_call(CASES[name], TARGETS[arch]):
        said = subprocess.run(
            [triton.knobs.nvidia.ptxas.path, "-v", f"-arch={arch}{suffix}", "-o", "/dev/null", "/dev/stdin"],
            input=kernel.asm["ptx"],
            capture_output=True,
            text=True,
            check=True,
        ).stderr
        spills = [int(n) for n in re.findall(r"(\d+) bytes spill", said)]
        assert spills, said
        assert max(spills) <= MOST_SPILLED, f"{kernel.metadata.name}: {said}"


def test_other_numbers_of_tokens_need_no_other_kernels() -> None:
    """A kernel for M = 1 or M = 16 alone would be compiled in the middle of serving."""
    hashes = [
        [kernel.hash for kernel in compile_call(MoECase(**SMALL, tokens=tokens), TARGETS["sm_90"])]
        for tokens in (1, 3, 16)
    ]
    assert hashes[0] == hashes[1] == hashes[2]
