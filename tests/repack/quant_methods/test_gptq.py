"""GPTQ checkpoints: the values of the oracle, `dynamic` overrides, and what is refused by name."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoints import CheckpointSpec, Source, make_source
from compare_layer import equal_bytes
from marlin_moe import MarlinMoELayer, MarlinMoEWarning, QuantScheme, process_weights
from marlin_moe.repack.errors import ExpertsError, SchemeError
from marlin_moe.repack.quant_methods.gptq import GPTQ
from marlin_moe.repack.quant_methods.method import PackedForm
from marlin_moe.repack.scheme import WeightScheme
from oracle import expected_dense

MODULE = "model.layers.0.mlp.experts"
SMALL = CheckpointSpec(storage="gptq", num_experts=2, hidden_size=64, intermediate_size=64, extras=())


def config_of(source: Source, **changes: Any) -> dict[str, Any]:
    return {**source.config["quantization_config"], **changes}


def load(source: Source, config: dict[str, Any] | None = None) -> MarlinMoELayer:
    scheme = QuantScheme.from_config(config or config_of(source), MODULE)
    return process_weights(source.expert_tensors(MODULE), scheme=scheme)


def assert_values(layer: MarlinMoELayer, source: Source) -> None:
    for name, got, wanted in zip(
        ("w13", "w2"), layer.dequantize(), expected_dense(source.layers[MODULE]), strict=True
    ):
        equal_bytes(got, wanted, name)


FORMS = {
    "4 bits": {},
    "8 bits": {"bits": 8},
    "zero points": {"symmetric": False},
    "8 bits, zero points": {"bits": 8, "symmetric": False},
    "one scale per column": {"group_size": None, "symmetric": False},
    "act-order": {"actorder": "group", "symmetric": False},
    "act-order, symmetric": {"actorder": "group", "bits": 8},
    "float16 scales": {"scale_dtype": torch.float16, "group_size": 64},
    "bias": {"bias": True},
}


@pytest.mark.parametrize("changes", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("storage", ["gptq", "gptq_v2"])
def test_the_values_are_those_of_the_oracle(storage: str, changes: dict[str, Any]) -> None:
    source = make_source(replace(SMALL, storage=storage, **changes))
    layer = load(source)
    assert_values(layer, source)
    assert layer.w13.format.symmetric == source.spec.symmetric
    assert layer.w13.scales.dtype == (source.spec.scale_dtype or source.spec.dtype)


def test_without_checkpoint_format_zeros_are_stored_minus_one() -> None:
    source = make_source(replace(SMALL, symmetric=False))
    config = config_of(source)
    del config["checkpoint_format"]
    assert_values(load(source, config), source)
    other = load(source, config_of(source, checkpoint_format="gptq_v2"))
    assert not torch.equal(other.dequantize()[0], load(source, config).dequantize()[0])


@pytest.mark.parametrize("actorder", [None, "group"])
def test_a_stored_15_is_a_zero_of_16_and_widens_the_matrix(actorder: str | None) -> None:
    source = make_source(replace(SMALL, symmetric=False, wrapped_zeros=True, actorder=actorder))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", MarlinMoEWarning)
        layer = load(source)
    for projections, warning in zip(("gate_proj, up_proj", "down_proj"), said, strict=True):
        assert f"experts: {projections} widened from 4 to 8 bits, exactly" in str(warning.message)
    assert (layer.w13.format.bits, layer.w2.format.bits) == (8, 8)
    assert_values(layer, source)


def test_only_the_matrix_with_a_16_is_widened() -> None:
    source = make_source(replace(SMALL, symmetric=False))
    name = f"{MODULE}.1.down_proj.qzeros"
    source.tensors[name][0, 0] |= 0xF  # column 0 of group 0
    with pytest.warns(MarlinMoEWarning, match="down_proj widened from 4 to 8 bits"):
        layer = load(source)
    assert (layer.w13.format.bits, layer.w2.format.bits) == (4, 8)
    down = source.layers[MODULE][1].down
    assert down.zero_points is not None
    down.zero_points[0, 0] = 16
    assert_values(layer, source)


def test_a_zero_of_256_is_refused_by_name() -> None:
    source = make_source(replace(SMALL, bits=8, symmetric=False, wrapped_zeros=True))
    text = r"experts: expected zero points of gate_proj, up_proj up to 255, .* got 256 \(stored as 255"
    with pytest.raises(ExpertsError, match=text):
        load(source)


@pytest.mark.parametrize(
    ("storage", "declared", "stored", "found"), [("gptq", "gptq_v2", 8, 7), ("gptq_v2", "gptq", 7, 8)]
)
def test_symmetric_zeros_that_are_not_the_middle_are_refused(
    storage: str, declared: str, stored: int, found: int
) -> None:
    """The config says which format: read as the other one, every weight would be off by one scale."""
    source = make_source(replace(SMALL, storage=storage))
    text = rf"0\.gate_proj\.qzeros: expected every stored zero point to be {stored}.*got {found} \.\. {found}"
    with pytest.raises(ExpertsError, match=text):
        load(source, config_of(source, checkpoint_format=declared))


def test_one_wrong_symmetric_zero_is_refused() -> None:
    source = make_source(SMALL)
    source.tensors[f"{MODULE}.1.up_proj.qzeros"][1, 0] ^= 1 << 8
    with pytest.raises(ExpertsError, match=r"1\.up_proj\.qzeros: expected every stored zero point to be 7"):
        load(source)


def test_columns_in_no_whole_words_are_refused() -> None:
    source = make_source(replace(SMALL, bits=8, group_size=None))
    tensors = source.expert_tensors(MODULE)
    tensors = {
        key: tensor[..., :62].contiguous() if tensor.dim() == 2 and "down_proj" not in key else tensor
        for key, tensor in tensors.items()
    }
    tensors = {
        key: tensor[:62].contiguous() if key.endswith("down_proj.g_idx") else tensor
        for key, tensor in tensors.items()
    }
    tensors = {k: t[:, :16] if k.endswith("qzeros") else t for k, t in tensors.items()}
    scheme = QuantScheme.from_config(config_of(source), MODULE)
    with pytest.raises(
        ExpertsError, match=r"0\.gate_proj\.qweight: expected a number of columns in whole words"
    ):
        process_weights(tensors, scheme=scheme)


def find(config: dict[str, Any], module: str = MODULE) -> QuantScheme | None:
    linears = {
        role: (f"{module}.0.{role}_proj", f"{module}.1.{role}_proj") for role in ("gate", "up", "down")
    }
    return QuantScheme.find(config, module, linears=linears)


BASE = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False}


def weights(**changes: Any) -> WeightScheme:
    plain = {"bits": 4, "group_size": 128, "symmetric": True, "zero_offset": 1}
    return WeightScheme(**plain | changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("dynamic", "w13", "w2"),
    [
        ({}, weights(), weights()),
        ({r"+:.*down_proj$": {"bits": 8}}, weights(), weights(bits=8)),
        (
            {r".*down_proj$": {"group_size": 32, "sym": False}},
            weights(),
            weights(group_size=32, symmetric=False),
        ),
        ({r"+:.*\.experts\..*": {"desc_act": True}}, weights(act_order=True), weights(act_order=True)),
        ({r"model\.layers\.1\..*": {"bits": 8}, r"-:.*attn.*": {}}, weights(), weights()),
        ({r".*experts.*": {"bits": 8}, r"-:.*experts.*": {}}, weights(bits=8), weights(bits=8)),
        ({r"down_proj": {"bits": 8}}, weights(), weights()),  # patterns match from the start of a name
    ],
)
def test_dynamic_overrides(dynamic: dict[str, Any], w13: WeightScheme, w2: WeightScheme) -> None:
    scheme = find({**BASE, "dynamic": dynamic})
    assert scheme is not None
    assert scheme.w13.same_format(w13)
    assert scheme.w2.same_format(w2)


def test_dynamic_leaves_modules_unquantized() -> None:
    dynamic = {"-:model\\.layers\\.0\\..*": {}, "+:.*": {"bits": 8}}
    assert find({**BASE, "dynamic": dynamic}) is None
    other = find({**BASE, "dynamic": dynamic}, "model.layers.10.mlp.experts")
    assert other is not None
    assert other.w13.bits == 8


@pytest.mark.parametrize(
    ("dynamic", "text"),
    [
        ({r"-:.*\.1\.up_proj": {}}, r"expected all its experts to be quantized.*1 of 6.*1\.up_proj"),
        ({r".*\.1\..*": {"bits": 8}}, r"experts\.1\.gate_proj: expected int4.*got int8"),
        (
            {r".*up_proj": {"group_size": 32}},
            r"0\.up_proj: expected int4, group_size 128.*got int4, group_size 32",
        ),
        ({r"+:.*(": {}}, r"dynamic: expected regular expressions, got '\+:\.\*\('"),
        ([r"-:.*"], "dynamic: expected patterns and overrides, got list"),
        ({r".*experts.*": {"bits": 3}}, r"dynamic\['\.\*experts\.\*'\]: expected 4 or 8 bits"),
    ],
)
def test_what_dynamic_may_not_say(dynamic: Any, text: str) -> None:
    with pytest.raises(SchemeError, match=text):
        find({**BASE, "dynamic": dynamic})


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"checkpoint_format": "marlin"}, "checkpoint_format: expected gptq, gptq_v2 or none, got 'marlin'"),
        ({"bits": "4"}, "bits: expected an integer, got '4'"),
        ({"bits": 3}, "expected 4 or 8 bits"),
        ({"group_size": 16}, "expected group_size 32, 64, 128"),
        ({"group_size": None}, "group_size: expected an integer, got None"),
        ({"sym": "yes"}, "sym: expected true or false, got 'yes'"),
        ({"desc_act": 1}, "desc_act: expected true or false, got 1"),
        ({"pack_dtype": "int8"}, "pack_dtype: expected int32, got 'int8'"),
    ],
)
def test_what_a_config_may_not_say(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(SchemeError, match=text):
        find({**BASE, **changes})


def test_group_size_minus_one_is_one_scale_per_column() -> None:
    scheme = find({**BASE, "group_size": -1, "desc_act": True})
    assert scheme is not None
    assert scheme.w13.same_format(weights(group_size=None))


@given(
    bits=st.sampled_from([4, 8]),
    zero_offset=st.sampled_from([0, 1]),
    symmetric=st.booleans(),
    group_size=st.sampled_from([32, None]),
    seed=st.integers(0, 2**20),
    data=st.data(),
)
@settings(max_examples=60, deadline=None)
def test_stored_is_the_inverse_of_canonical(
    bits: int, zero_offset: int, symmetric: bool, group_size: int | None, seed: int, data: st.DataObject
) -> None:
    """Also where 4 bits are held in 8, as for a zero of 16."""
    widened = data.draw(st.sampled_from([bits, 8]))
    scheme = WeightScheme(bits=bits, group_size=group_size, symmetric=symmetric, zero_offset=zero_offset)
    n, k = 32, 64
    form = PackedForm(scheme=scheme, bits=widened, size_n=n, size_k=k)
    generator = torch.Generator().manual_seed(seed)
    for field in GPTQ().fields(scheme, size_n=n, size_k=k):
        if field.becomes is None:
            middle = 2 ** (bits - 1) - zero_offset
            word = sum(middle << shift for shift in range(0, 32, bits))
            wanted = torch.full(field.shape, word - (word >> 31 << 32), dtype=torch.int32)
            canonical = None
        else:
            wanted = torch.randint(-(2**31), 2**31, field.shape, generator=generator).to(field.dtypes[0])
            if field.becomes == "weight_zero_point" and zero_offset and bits == widened:
                wanted &= 0x77777777 if bits == 4 else 0x7F7F7F7F  # a highest stored zero needs more bits
            method = GPTQ()
            canonical = method.canonical(field.becomes, wanted[None, None], scheme, bits=widened)[0, 0]
        stored = GPTQ().stored(field, canonical, form)
        equal_bytes(stored, wanted, field.name)
