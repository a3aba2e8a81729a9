"""AWQ checkpoints: the values of the oracle, spellings of the config, and what is refused by name."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from checkpoints import CheckpointSpec, make_source
from compare_layer import equal_bytes
from marlin_moe import QuantScheme, process_weights
from marlin_moe.repack.errors import ExpertsError, SchemeError
from marlin_moe.repack.quant_methods.awq import AWQ
from marlin_moe.repack.quant_methods.method import PackedForm
from marlin_moe.repack.scheme import WeightScheme
from oracle import expected_dense

MODULE = "model.layers.0.mlp.experts"
SMALL = CheckpointSpec(
    storage="awq", num_experts=2, hidden_size=64, intermediate_size=64, symmetric=False, extras=()
)
BASE = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"group_size": 64},
        {"group_size": None},
        {"bias": True},
        {"intermediate_size": 96},
        {"scale_dtype": torch.float16},
        {"naming": "mixtral"},
    ],
    ids=str,
)
def test_the_values_are_those_of_the_oracle(changes: dict[str, Any]) -> None:
    source = make_source(replace(SMALL, **changes))
    (module,) = source.layers
    scheme = QuantScheme.from_config(source.config["quantization_config"], module)
    layer = process_weights(source.expert_tensors(module), scheme=scheme)
    dense = expected_dense(source.layers[module])
    for name, got, wanted in zip(("w13", "w2"), layer.dequantize(), dense, strict=True):
        equal_bytes(got, wanted, name)
    assert layer.w13.scales.dtype == (source.spec.scale_dtype or source.spec.dtype)
    assert (layer.w13.format.bits, layer.w13.format.symmetric) == (4, False)


def find(config: dict[str, Any], module: str = MODULE) -> QuantScheme | None:
    linears = {
        role: (f"{module}.0.{role}_proj", f"{module}.1.{role}_proj") for role in ("gate", "up", "down")
    }
    return QuantScheme.find(config, module, linears=linears)


@pytest.mark.parametrize(
    "config",
    [
        BASE,
        {"quant_method": "awq", "w_bit": 4, "q_group_size": 128},
        {"quant_method": "awq", "w_bit": 4, "q_group_size": 128, "zero_point": True, "version": "GEMM"},
        {**BASE, "modules_to_not_convert": None},
    ],
    ids=str,
)
def test_spellings_of_one_config(config: dict[str, Any]) -> None:
    scheme = find(config)
    assert scheme is not None
    assert scheme.w13.same_format(WeightScheme(bits=4, group_size=128, symmetric=False))
    assert scheme.w2.same_format(scheme.w13)


def test_group_size_minus_one_is_one_scale_per_column() -> None:
    scheme = find({**BASE, "group_size": -1})
    assert scheme is not None
    assert scheme.w13.group_size is None


@pytest.mark.parametrize(
    ("excluded", "quantized"),
    [
        (["gate", "self_attn", "lm_head"], True),  # gate is the router, not gate_proj
        (["mlp.gate"], True),
        (["shared_experts"], True),
        (["model.layers.1"], True),  # not layer 0, and not 10
        (["experts"], False),
        (["model.layers.0"], False),
        (["mlp"], False),
    ],
)
def test_modules_to_not_convert(excluded: list[str], quantized: bool) -> None:
    assert (find({**BASE, "modules_to_not_convert": excluded}) is not None) == quantized
    assert find({**BASE, "modules_to_not_convert": ["model.layers.1"]}, "model.layers.10.mlp.experts")


def test_experts_converted_in_part_are_refused() -> None:
    with pytest.raises(
        SchemeError, match=r"expected all its experts to be quantized.*2 of 6.*0\.down_proj first"
    ):
        find({**BASE, "modules_to_not_convert": ["down_proj"]})


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"version": "gemv"}, "version: expected gemm, .* got 'gemv'"),
        ({"version": "marlin"}, "version: expected gemm, .* got 'marlin'"),
        ({"bits": 8}, "bits: expected 4, which AWQ packs, got 8"),
        ({"bits": None}, "bits: expected an integer, got None"),
        ({"group_size": "128"}, "group_size: expected an integer, got '128'"),
        ({"group_size": 256}, "expected group_size 32, 64, 128"),
        ({"zero_point": False}, "zero_point: expected true, got False"),
    ],
)
def test_what_a_config_may_not_say(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(SchemeError, match=text):
        find({**BASE, **changes})


def test_missing_zero_points_are_named() -> None:
    source = make_source(SMALL)
    tensors = source.expert_tensors(MODULE)
    del tensors["1.up_proj.qzeros"]
    scheme = QuantScheme.from_config(source.config["quantization_config"], MODULE)
    with pytest.raises(ExpertsError, match=r"expected 1 tensors more.*1\.up_proj\.qzeros"):
        process_weights(tensors, scheme=scheme)


@pytest.mark.parametrize("group_size", [32, None])
def test_stored_is_the_inverse_of_canonical(group_size: int | None) -> None:
    scheme = WeightScheme(bits=4, group_size=group_size, symmetric=False)
    n, k = 64, 96
    form = PackedForm(scheme=scheme, bits=4, size_n=n, size_k=k)
    generator = torch.Generator().manual_seed(5)
    method = AWQ()
    for field in method.fields(scheme, size_n=n, size_k=k):
        assert field.becomes is not None
        wanted = torch.randint(-(2**31), 2**31, field.shape, generator=generator).to(field.dtypes[0])
        canonical = method.canonical(field.becomes, wanted[None, None], scheme, bits=4)[0, 0]
        equal_bytes(method.stored(field, canonical, form), wanted, field.name)
