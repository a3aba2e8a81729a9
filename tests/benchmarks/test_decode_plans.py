"""The plans beside the decode path's own: which there are, and that they are right on an emulated GPU."""

from pathlib import Path

import pytest
from decode_plans import alternatives
from layer_problems import FORMATS, SHAPES
from layer_tensors import random_layer

from gpu_on_cpu import COMPILER, EmulatedKernel
from marlin_moe.kernels.plan import decode
from marlin_moe.kernels.plan.problem import LayerFacts
from moe_cases import DenseMoE, MoECase, check, make_call, make_layer

CASE = MoECase(tokens=9, num_experts=5, top_k=3, hidden_size=256, padded_intermediate_size=192)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_chosen_plan_stands_first_among_others_that_fit(shape: str) -> None:
    facts = LayerFacts.of(random_layer(SHAPES[shape], FORMATS["int4"], device="meta"))
    rows = 4 * SHAPES[shape].top_k
    found = alternatives(facts, rows=rows)
    assert next(iter(found.values())) == decode.choose_variant(facts, rows=rows, arch="sm_90a")
    assert len(set(found.values())) == len(found) > 6
    for variant in found.values():
        assert variant.smem_bytes(num_experts=facts.num_experts, slots=rows) <= decode.SMEM_BYTES[90]


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
@pytest.mark.parametrize("plan", ["t8 2x4", "t8 3x2", "t8 1x6", "t16 3x2"])
def test_every_kind_of_plan_is_right(plan: str, tmp_path: Path) -> None:
    made = make_layer(CASE)
    call = make_call(CASE, made.layer)
    variant = alternatives(LayerFacts.of(made.layer), rows=CASE.tokens * CASE.top_k)[plan]
    got = EmulatedKernel.compile(variant, tmp_path).run(made.layer, call, blocks=3)
    check(CASE, call, got, DenseMoE(made)(call))
