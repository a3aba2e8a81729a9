"""The kernels' own sources on a CPU: all policies, several grids, threads in random order, late copies."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from float16_range import CASE, range_call
from gpu_on_cpu import COMPILER, EmulatedKernel
from marlin_moe.kernels.plan import cuda_moe, decode
from marlin_moe.kernels.plan.problem import LayerFacts
from marlin_moe.kernels.plan.variant import KernelVariant
from moe_cases import DenseMoE, MoECase, check, make_call, make_layer

SMALL = {"hidden_size": 128, "padded_intermediate_size": 64, "num_experts": 3, "top_k": 2}
DECODE = [
    MoECase(tokens=1, num_experts=9, hidden_size=256, padded_intermediate_size=128, top_k=8),
    MoECase(tokens=17, num_experts=5, hidden_size=192, padded_intermediate_size=192, symmetric=False),
    MoECase(**SMALL, tokens=40, bits=8, dtype=torch.float16, activation="situ", expert_map="ranks"),
    MoECase(
        **SMALL, tokens=20, bits=8, symmetric=False, w2_bits=4, group_size=64, biased=True, routing="one"
    ),
    MoECase(
        tokens=9, num_experts=3, top_k=3, dtype=torch.float16, group_size=None, act_order=True, scaling=2.5
    ),
    MoECase(**SMALL, tokens=30, bits=8, group_size=None, symmetric=False, activation="relu2", biased=True),
    MoECase(**SMALL, tokens=7, act_order=True, on_input=True, routing="holes", activation="gelu"),
    MoECase(num_experts=2, top_k=2, tokens=5, hidden_size=64, padded_intermediate_size=704, padding=40),
    MoECase(
        tokens=50, num_experts=33, top_k=4, hidden_size=128, padded_intermediate_size=128, group_size=128
    ),
    MoECase(tokens=70, num_experts=33, top_k=4, hidden_size=128, padded_intermediate_size=64),  # > 256 slots
]
GENERAL = [
    MoECase(**SMALL, tokens=33, symmetric=False, biased=True, activation="swiglu_oai", routing="holes"),
    MoECase(**SMALL, tokens=9, bits=8, dtype=torch.float16, act_order=True, group_size=64),
    MoECase(**SMALL, tokens=70, group_size=None, activation="silu_no_mul", on_input=True),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where kernels are compiled."""
    if COMPILER is None:
        pytest.skip("no C++ compiler")
    return tmp_path_factory.mktemp("emulated")


def decode_variant(case: MoECase, facts: LayerFacts) -> KernelVariant:
    variant = decode.choose_variant(facts, rows=case.tokens * case.top_k, arch="sm_90a")
    assert variant is not None
    return variant


@pytest.mark.parametrize("case", DECODE, ids=str)
def test_the_decode_path(case: MoECase, folder: Path) -> None:
    run_on_grids(case, EmulatedKernel.compile(decode_variant(case, facts_of(case)), folder), (1, 3, 7))


@pytest.mark.parametrize("case", GENERAL, ids=str)
def test_the_general_path(case: MoECase, folder: Path) -> None:
    variant = cuda_moe.choose_general(facts_of(case), rows=case.tokens * case.top_k)
    run_on_grids(case, EmulatedKernel.compile(variant, folder), (1, 3))


def facts_of(case: MoECase) -> LayerFacts:
    return LayerFacts.of(make_layer(case).layer)


def run_on_grids(case: MoECase, kernel: EmulatedKernel, grids: tuple[int, ...]) -> None:
    """Right on every grid, and the same bits for every order of threads and copies."""
    made = make_layer(case)
    call = make_call(case, made.layer)
    want = DenseMoE(made)(call)
    for blocks in grids:
        got = kernel.run(made.layer, call, blocks=blocks)
        check(case, call, got, want)
        assert torch.equal(got, kernel.run(made.layer, call, blocks=blocks, seed=blocks + 1))


@pytest.mark.parametrize("path", ["decode", "general"])
def test_float16_activations_beyond_its_range_are_infinite(path: str, folder: Path) -> None:
    case = range_call()
    facts = LayerFacts.of(case.made.layer)
    if path == "decode":
        variant = decode_variant(CASE, facts)
    else:
        variant = cuda_moe.choose_general(facts, rows=CASE.tokens * CASE.top_k)
    kernel = EmulatedKernel.compile(variant, folder)
    case.check_infinite(kernel.run(case.made.layer, case.call, blocks=3))


def test_all_slots_elsewhere_give_zeros(folder: Path) -> None:
    case = MoECase(**SMALL, tokens=6)
    made = make_layer(case)
    call = make_call(case, made.layer)
    nobody = replace(call, ids=torch.full_like(call.ids, -1))
    kernel = EmulatedKernel.compile(decode_variant(case, facts_of(case)), folder)
    assert not kernel.run(made.layer, nobody).any()
    assert kernel.run(made.layer, call).any()


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("decode.cu", "  grid.sync();\n  second_gemm", "  second_gemm"),
        ("decode.cu", "  grid.sync();\n  add_slots", "  add_slots"),
        (
            "decode.cu",
            "      chunk.put(block.tokens(buffer));\n      sync_consumers();",
            "      chunk.put(block.tokens(buffer));",
        ),
        ("decode_producer.cuh", "    wait_for(full + at(), round() & 1);\n", ""),
        ("decode_producer.cuh", "    wait_for(empty + at(), (round() & 1) ^ 1);\n", ""),
        ("decode_work.cuh", "owners = min(most_owners, numbers)", "owners = most_owners"),
    ],
    ids=["grid barrier", "last barrier", "chunk of tokens", "full stage", "empty stage", "empty pieces"],
)
def test_what_it_would_see(file: str, old: str, new: str, folder: Path) -> None:
    """A kernel without one of its barriers, or with pieces that no block computes, is found out."""
    case = MoECase(
        tokens=2,
        num_experts=2,
        top_k=1,
        hidden_size=4096 if "chunk" in old else 1024,  # many chunks; fewer slots than blocks
        padded_intermediate_size=256,
        routing="one",
    )
    made = make_layer(case)
    call = make_call(case, made.layer)
    want = DenseMoE(made)(call)
    variant = decode_variant(case, facts_of(case))
    run_on_grids(case, EmulatedKernel.compile(variant, folder), (3, 19))
    broken = EmulatedKernel.compile(variant, folder, edit=(file, old, new))

    def run_broken() -> None:
        for blocks, seed in itertools.product((3, 19), range(8)):
            check(case, call, broken.run(made.layer, call, blocks=blocks, seed=seed), want)

    with pytest.raises(AssertionError):
        run_broken()
