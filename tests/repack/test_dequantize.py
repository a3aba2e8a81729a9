"""The weights of quantized linears that are no experts, against the oracle; and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from folders import checkpoint_folders, golden
from hf_checkpoints import Weights, compress
from marlin_moe import MarlinMoEError
from marlin_moe.repack.dequantize import dequantized, quantized_linears
from oracle_folder import projection_from, quantization_config, read_tensors
from oracle_formats import unpack_gptq


def fields_of(path: Path, linear: str) -> dict[str, torch.Tensor]:
    tensors = read_tensors(path)
    return {field: tensors[f"{linear}.{field}"] for field in quantized_linears(tensors)[linear]}


@pytest.mark.parametrize("folder", checkpoint_folders(), ids=lambda path: path.name)
def test_every_linear_has_the_oracles_weight(folder: Path) -> None:
    tensors, config = read_tensors(folder), quantization_config(folder)
    linears = quantized_linears(tensors)
    assert len(linears) > 40
    for linear in list(linears)[:: max(1, len(linears) // 12)]:
        found = dequantized(linear, fields_of(folder, linear), config)
        expected = projection_from(tensors, linear, config).dense()
        torch.testing.assert_close(found, expected, rtol=0, atol=0, msg=linear)


def test_a_gptq_zero_point_of_16() -> None:
    """Stored as 15 in the first format: every nibble of qzeros is set."""
    words = torch.randint(-(2**31), 2**31, (8, 64), generator=torch.Generator().manual_seed(0))
    scales = torch.rand(64, 2).add(0.1)
    fields = {
        "qweight": words.int(),
        "qzeros": torch.full((2, 8), -1, dtype=torch.int32),
        "scales": scales.t().contiguous(),
    }
    config = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False, "desc_act": False}
    found = dequantized("model.q_proj", fields, config)
    expected = (unpack_gptq(fields["qweight"], 4) - 16).float() * scales.repeat_interleave(32, dim=1)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_plain_weights_are_no_quantized_linears() -> None:
    names = ["a.weight", "a.bias", "b.weight_packed", "b.weight_shape", "c.k_scale", "norm.weight"]
    assert quantized_linears(names) == {"b": ("weight_packed", "weight_shape")}


ASYMMETRIC = golden("qwen3moe-w4a16-asym-g128")
LINEAR = "model.layers.0.self_attn.k_proj"


def test_a_field_that_is_missing() -> None:
    fields = fields_of(ASYMMETRIC, LINEAR)
    del fields["weight_zero_point"]
    with pytest.raises(MarlinMoEError, match=rf"{LINEAR}\.weight_zero_point: expected I32 .*, got none"):
        dequantized(LINEAR, fields, quantization_config(ASYMMETRIC))


def test_a_linear_that_the_config_does_not_quantize() -> None:
    fields, config = fields_of(ASYMMETRIC, LINEAR), dict(quantization_config(ASYMMETRIC))
    config["ignore"] = ["re:.*self_attn.*"]
    with pytest.raises(MarlinMoEError, match=rf"{LINEAR}: expected quantization_config to target it"):
        dequantized(LINEAR, fields, config)


@pytest.mark.parametrize(("bits", "group_size"), [(3, 32), (4, 16)])
def test_formats_that_marlin_does_not_run(bits: int, group_size: int) -> None:
    """compressed-tensors reads them; scales are float32, so nothing is rounded to their dtype."""
    weights = Weights(bits=bits, group_size=group_size)
    fields = compress(torch.randn(64, 96, generator=torch.Generator().manual_seed(0)).bfloat16(), weights)
    config = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights.as_config()}},
    }
    found = dequantized("model.q_proj", fields, config)
    steps = found / fields["weight_scale"].float().repeat_interleave(group_size, dim=1)
    torch.testing.assert_close(steps, steps.round(), rtol=0, atol=1e-4)
    assert int(steps.round().min()) == -(2 ** (bits - 1))


@pytest.mark.parametrize(
    ("value", "found"),
    [(float("nan"), "1 NaN or Inf"), (float("inf"), "1 NaN or Inf"), (0.0, "nothing but zeros")],
)
@pytest.mark.parametrize("bits", [4, 3])  # 3: read by compressed-tensors
def test_scales_that_no_linear_can_have(bits: int, value: float, found: str) -> None:
    weights = Weights(bits=bits, group_size=32)
    fields = compress(torch.randn(64, 96, generator=torch.Generator().manual_seed(0)).bfloat16(), weights)
    scales = fields["weight_scale"]
    scales[5 if value else slice(None), 1 if value else slice(None)] = value
    config = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights.as_config()}},
    }
    expected = rf"model\.v_proj\.weight_scale: expected finite values, not all zero.*got {found} among 192"
    with pytest.raises(MarlinMoEError, match=expected):
        dequantized("model.v_proj", fields, config)


def test_a_method_without_a_reader() -> None:
    with pytest.raises(MarlinMoEError, match="expected one of compressed-tensors, gptq, awq, got 'hqq'"):
        dequantized("a", {"weight_packed": torch.zeros(1)}, {"quant_method": "hqq"})
    with pytest.raises(MarlinMoEError, match=r"a: expected a format .* got weight_scale in gptq"):
        dequantized("a", {"weight_scale": torch.zeros(1)}, {"quant_method": "gptq"})
