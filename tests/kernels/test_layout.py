"""The Marlin layout against the oracle, tensors of the public reference, and its own inverse."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import pytest
import torch

from compare_layer import equal_bytes
from folders import golden_folders
from marlin_moe.kernels import layout
from marlin_moe.kernels.errors import LayoutError
from oracle import (
    marlin_bias,
    marlin_qweight,
    marlin_scales,
    marlin_zero_points,
    unpack_ct,
    unpack_ct_zero_points,
)
from oracle_folder import projection_from, quantization_config, read_expected, read_tensors, sha256
from oracle_marlin import values_of_marlin, zero_points_of_marlin

SHAPES = [(64, 16), (64, 128), (128, 48), (320, 64), (192, 256)]  # N, K


def words(*shape: int, seed: int = 0) -> torch.Tensor:
    """int32 words of any bits: every field takes every value, the sign bit among them."""
    made = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**31), 2**31, shape, generator=made, dtype=torch.int64).to(torch.int32)


def distinct_scales(*shape: int) -> torch.Tensor:
    """float32 without two alike, so that any misplaced one is seen."""
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("size_n", "size_k"), SHAPES)
def test_qweight_is_the_oracles(size_n: int, size_k: int, bits: int) -> None:
    packed = words(2, size_n, size_k * bits // 32)
    got = layout.pack_qweight(packed, bits=bits)
    for expert in range(2):
        values = unpack_ct(packed[expert], bits)
        equal_bytes(got[expert], marlin_qweight(values, bits), f"qweight[{expert}]")
        back = unpack_ct(layout.unpack_qweight(got[expert], bits=bits), bits)
        equal_bytes(back, values_of_marlin(got[expert], bits), f"unpacked[{expert}]")


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("lead", [(), (1,), (3,), (2, 3)])
@pytest.mark.parametrize(("size_n", "size_k"), SHAPES)
def test_qweight_and_back(size_n: int, size_k: int, lead: tuple[int, ...], bits: int) -> None:
    packed = words(*lead, size_n, size_k * bits // 32)
    qweight = layout.pack_qweight(packed, bits=bits)
    assert qweight.shape == (*lead, size_k // 16, size_n * bits // 2)
    assert qweight.is_contiguous()
    equal_bytes(layout.unpack_qweight(qweight, bits=bits), packed, "there and back")


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(
    "stride",
    [
        lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
        lambda t: torch.cat([t, t], 1)[:, : t.shape[1]],
        lambda t: torch.repeat_interleave(t, 2, 2)[..., ::2],
        lambda t: t[:1].expand_as(t),
    ],
    ids=["transposed", "rows of more", "every other word", "expanded"],
)
def test_strides_make_no_difference(stride: Callable[[torch.Tensor], torch.Tensor], bits: int) -> None:
    packed = stride(words(3, 128, 64 * bits // 32))
    equal_bytes(
        layout.pack_qweight(packed, bits=bits), layout.pack_qweight(packed.contiguous(), bits=bits), "qweight"
    )
    qweight = stride(words(3, 4, 64 * bits // 2))
    equal_bytes(
        layout.unpack_qweight(qweight, bits=bits), layout.unpack_qweight(qweight.contiguous(), bits=bits), ""
    )
    zeros = stride(words(3, 64 * bits // 32, 4))
    equal_bytes(
        layout.pack_zero_points(zeros, bits=bits), layout.pack_zero_points(zeros.contiguous(), bits=bits), ""
    )


@pytest.mark.parametrize("groups", [1, 2, 3, 8])
@pytest.mark.parametrize("size_n", [64, 128, 320])
def test_scales(size_n: int, groups: int) -> None:
    scales = distinct_scales(2, size_n, groups)
    got = layout.permute_scales(scales)
    for expert in range(2):
        equal_bytes(got[expert], marlin_scales(scales[expert]), f"scales[{expert}]")
    equal_bytes(layout.unpermute_scales(got), scales, "there and back")


@pytest.mark.parametrize("groups", [1, 2, 5])
@pytest.mark.parametrize("size_n", [64, 192])
@pytest.mark.parametrize("bits", [4, 8])
def test_zero_points(bits: int, size_n: int, groups: int) -> None:
    zeros = words(2, size_n * bits // 32, groups)
    got = layout.pack_zero_points(zeros, bits=bits)
    assert got.shape == (2, groups, size_n * bits // 32)
    for expert in range(2):
        values = unpack_ct_zero_points(zeros[expert], bits)
        equal_bytes(got[expert], marlin_zero_points(values, bits), f"zero_points[{expert}]")
        in_columns = layout.zero_point_values(got[expert], bits=bits)
        equal_bytes(in_columns.T, zero_points_of_marlin(got[expert], bits), "values")
    equal_bytes(layout.unpack_zero_points(got, bits=bits), zeros, "there and back")


def test_bias_has_the_order_of_one_group() -> None:
    bias = distinct_scales(2, 192)
    got = layout.permute_bias(bias)
    equal_bytes(got[1], marlin_bias(bias[1]), "bias")
    equal_bytes(got[1], layout.permute_scales(bias[1][:, None])[0], "as one scale per column")
    equal_bytes(layout.unpermute_bias(got), bias, "there and back")


@pytest.mark.parametrize("bits", [4, 8])
def test_fields(bits: int) -> None:
    packed = words(3, 5)
    fields = layout.unpack_fields(packed, bits=bits)
    equal_bytes(fields, unpack_ct(packed, bits), "fields")
    assert int(fields.min()) >= 0
    equal_bytes(layout.pack_fields(fields, bits=bits), packed, "there and back")


@pytest.mark.parametrize("folder", golden_folders(), ids=lambda path: path.name)
def test_golden_bytes(folder) -> None:
    """The first layer's Marlin tensors, from its tensors by these functions alone, without any pipeline."""
    expected = read_expected(folder)
    tensors, config = read_tensors(folder), quantization_config(folder)
    if not expected.marlin_sha256:
        pytest.skip("no Marlin hashes")
    names = ("w1", "w3", "w2") if "mixtral" in folder.name else ("gate_proj", "up_proj", "down_proj")
    made: dict[str, list[torch.Tensor]] = {name: [] for name in expected.marlin_sha256}
    for number in range(8):
        gate, up, down = (f"{expected.module}.{number}.{name}" for name in names)
        bits = projection_from(tensors, gate, config).bits
        for matrix, stems in (("w13", (gate, up)), ("w2", (down,))):
            parts = {
                part: torch.cat([tensors[f"{stem}.{part}"] for stem in stems])
                for part in ("weight_packed", "weight_scale", "weight_zero_point")
                if f"{stems[0]}.{part}" in tensors
            }
            made[f"{matrix}_scales"].append(layout.permute_scales(parts["weight_scale"]))
            made[f"{matrix}_qweight"].append(layout.pack_qweight(parts["weight_packed"], bits=bits))
            if "weight_zero_point" in parts:
                zeros = layout.pack_zero_points(parts["weight_zero_point"], bits=bits)
                made[f"{matrix}_zero_points"].append(zeros)
    for name, parts_of in made.items():
        stacked = torch.stack(parts_of)
        if name in expected.marlin:
            equal_bytes(stacked, expected.marlin[name], name)
        assert sha256(stacked) == expected.marlin_sha256[name], name


def test_first_words_by_hand() -> None:
    """k counts up in a column of 16: lane 0's first words, written out from the drawing."""
    k = torch.arange(16)
    packed = layout.pack_fields(k.expand(64, 16).contiguous(), bits=4)
    assert f"{int(layout.pack_qweight(packed, bits=4)[0, 0]) & 0xFFFFFFFF:08x}" == "91918080"
    packed = layout.pack_fields(k.expand(64, 16).contiguous(), bits=8)
    assert f"{int(layout.pack_qweight(packed, bits=8)[0, 0]):08x}" == "09010800"
    assert f"{int(layout.pack_qweight(packed, bits=8)[0, 8]):08x}" == "0b030a02"
    columns = layout.order_columns(torch.arange(64), grouped=True)
    assert columns[:9].tolist() == [0, 8, 16, 24, 32, 40, 48, 56, 1]
    columns = layout.order_columns(torch.arange(64), grouped=False)
    assert columns[:10].tolist() == [0, 1, 8, 9, 16, 17, 24, 25, 2, 3]


def test_results_are_new_tensors_and_inputs_stay() -> None:
    packed, scales, bias = words(2, 64, 2), distinct_scales(2, 64, 4), distinct_scales(2, 64)
    before = [hashlib.sha256(t.numpy().tobytes()).digest() for t in (packed, scales, bias)]
    for result in (
        layout.pack_qweight(packed, bits=4),
        layout.permute_scales(scales),
        layout.permute_bias(bias),
        layout.pack_zero_points(packed[:, :8], bits=4),
    ):
        result.zero_()
    assert [hashlib.sha256(t.numpy().tobytes()).digest() for t in (packed, scales, bias)] == before


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: layout.pack_qweight(words(64, 1), bits=4), r"weight_packed: .*K of 16.*K=8\. Pad"),
        (
            lambda: layout.pack_qweight(words(96, 2), bits=4),
            r"weight_packed: .*N to be a multiple of 64.*N=96",
        ),
        (lambda: layout.pack_qweight(words(0, 2), bits=4), "N=0"),
        (lambda: layout.pack_qweight(words(64, 0), bits=8), "K=0"),
        (lambda: layout.pack_qweight(words(64, 2), bits=3), "expected bits to be 4 or 8.*got 3"),
        (lambda: layout.pack_qweight(words(64, 2).long(), bits=4), r"int32 words.*int64 \(64, 2\)"),
        (lambda: layout.pack_qweight(words(64), bits=4), r"two dimensions, got torch.int32 \(64,\)"),
        (lambda: layout.unpack_qweight(words(1, 100), bits=4), "qweight: .*N=50"),
        (lambda: layout.permute_scales(torch.ones(65, 2)), "weight_scale: .*multiple of 64.*got 65"),
        (lambda: layout.permute_bias(torch.ones(0)), "bias: .*got 0"),
        (lambda: layout.pack_zero_points(words(4, 2), bits=4), "weight_zero_point: .*got 32"),
    ],
)
def test_refusals(call: Callable[[], torch.Tensor], text: str) -> None:
    with pytest.raises(LayoutError, match=text):
        call()
