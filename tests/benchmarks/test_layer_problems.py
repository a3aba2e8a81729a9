"""Bytes, operations and the floor, beside figures worked out by hand."""

import pytest
from layer_problems import FORMATS, SHAPES, Ceilings, expert_bytes, floor_us, layer_count, layer_flops

CEILINGS = Ceilings(copy_bytes_per_s=4.25e12, read_bytes_per_s=4.3e12, matmul_flops_per_s=712e12)


def test_bytes_of_an_expert_are_words_and_scales() -> None:
    w13 = 7168 * 512 // 2 + 224 * 512 * 2
    w2 = 256 * 7168 // 2 + 8 * 7168 * 2
    assert expert_bytes(SHAPES["kimi-k2.5-tp8"], FORMATS["int4"]) == w13 + w2


@pytest.mark.parametrize(
    ("form", "more"),
    [
        ("int8", 3 * 7168 * 256 // 2),
        ("int4-asym", (224 * 512 + 8 * 7168) // 2),
        ("int4-act-order", 4 * 7168),
    ],
)
def test_other_formats_take_more_bytes(form: str, more: int) -> None:
    shape = SHAPES["kimi-k2.5-tp8"]
    assert expert_bytes(shape, FORMATS[form]) - expert_bytes(shape, FORMATS["int4"]) == more


def test_an_operation_count_counts_every_slot() -> None:
    assert layer_flops(SHAPES["mixtral-8x7b"], tokens=3) == 3 * 2 * 2 * 3 * 4096 * 14336


@pytest.mark.parametrize(
    ("name", "tokens", "active_experts", "us"),
    [("kimi-k2.5-tp8", 1, 8, 5.8), ("mixtral-8x7b", 1, 2, 42.4), ("mixtral-8x7b", 8192, 8, 8102)],
)
def test_the_floor_is_the_longer_of_reading_and_computing(
    name: str, tokens: int, active_experts: int, us: float
) -> None:
    found = floor_us(
        SHAPES[name], FORMATS["int4"], tokens=tokens, active_experts=active_experts, ceilings=CEILINGS
    )
    assert found == pytest.approx(us, rel=0.01)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=lambda shape: shape.name)
@pytest.mark.parametrize("form", FORMATS.values(), ids=lambda form: form.name)
def test_layers_of_a_graph_do_not_fit_the_cache_and_fit_the_memory(shape, form) -> None:
    count = layer_count(shape, form)
    per_layer = shape.num_experts * expert_bytes(shape, form)
    assert 2 <= count <= 8
    assert 1e9 < count * per_layer < 32e9
