"""QuantFormat, MarlinMatrix, Shard and MarlinMoELayer: what they check, and what a layer does."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from compare_layer import equal_bytes, same_layer
from marlin_moe import MarlinMoELayer, QuantFormat, Shard
from marlin_moe.kernels.errors import LayerError, MarlinMoEError
from marlin_moe.kernels.workspace import reserve
from oracle import dequantize, scales_of_marlin, values_of_marlin, zero_points_of_marlin
from random_layer import random_bias, random_layer


def parts(layer: MarlinMoELayer) -> dict[str, Any]:
    """Arguments of `from_marlin` that make `layer` again."""
    fields = ("qweight", "scales", "zero_points", "bias")
    made = {f"{m}_{f}": getattr(getattr(layer, m), f) for m in ("w13", "w2") for f in fields}
    form = layer.w13.format
    return made | {"bits": form.bits, "group_size": form.group_size, "symmetric": form.symmetric}


def dense_of(layer: MarlinMoELayer, name: str, expert: int) -> torch.Tensor:
    matrix = getattr(layer, name)
    bits, zeros = matrix.format.bits, matrix.zero_points
    return dequantize(
        values_of_marlin(matrix.qweight[expert], bits),
        scales_of_marlin(matrix.scales[expert]),
        None if zeros is None else zero_points_of_marlin(zeros[expert], bits),
        None,
        bits,
    )


@pytest.mark.parametrize(
    ("bits", "group_size", "symmetric", "dtype"),
    [
        (4, 32, True, torch.bfloat16),
        (4, 64, False, torch.float16),
        (4, None, False, torch.float32),
        (8, 64, False, torch.float32),
        (8, None, True, torch.float16),
    ],
)
def test_dequantize(bits: int, group_size: int | None, symmetric: bool, dtype: torch.dtype) -> None:
    layer = random_layer(
        num_experts=2,
        bits=bits,
        group_size=group_size,
        symmetric=symmetric,
        dtype=dtype,
        padded_intermediate_size=128,
        intermediate_size=96,
    )
    w13, w2 = layer.dequantize()
    assert w13.shape == (2, 192, 128)
    for expert in range(2):
        halves = dense_of(layer, "w13", expert).view(2, 128, 128)[:, :96].reshape(192, 128)
        equal_bytes(w13[expert], halves, f"w13[{expert}]")
        equal_bytes(w2[expert], dense_of(layer, "w2", expert)[:, :96], f"w2[{expert}]")


def test_dequantize_of_some_experts() -> None:
    layer = random_layer(num_experts=4)
    w13, w2 = layer.dequantize()
    for chosen in ([3, 1], torch.tensor([3, 1]), torch.tensor([3, 1], dtype=torch.int32)):
        some13, some2 = layer.dequantize(chosen)
        equal_bytes(some13, w13[[3, 1]], "w13")
        equal_bytes(some2, w2[[3, 1]], "w2")
    assert layer.dequantize([])[0].shape == (0, 128, 128)


def test_sort_order_is_undone() -> None:
    layer = random_layer(num_experts=2)
    made = torch.Generator().manual_seed(1)
    order = torch.stack([torch.randperm(128, generator=made) for _ in range(2)]).int()
    sorted_layer = MarlinMoELayer.from_marlin(**parts(layer), w13_sort_order=order)
    plain, _ = layer.dequantize()
    got, _ = sorted_layer.dequantize()
    for expert in range(2):
        for position in range(128):
            column = got[expert][:, order[expert, position]]
            equal_bytes(column, plain[expert][:, position], f"column {position} of expert {expert}")


def test_an_ungated_layer_has_one_half() -> None:
    layer = random_layer(gated=False, padded_intermediate_size=128)
    assert layer.dequantize()[0].shape == (5, 128, 128)
    assert (layer.w13.size_n, layer.padded_intermediate_size) == (128, 128)


@pytest.mark.parametrize("name", ["w13_qweight", "w2_scales"])
def test_tensors_with_gaps_are_refused(name: str) -> None:
    """A kernel reads them from their first address on."""
    given = parts(random_layer())
    given[name] = torch.stack((given[name], given[name]), dim=-1)[..., 0]
    with pytest.raises(LayerError, match=rf"{name.split('_')[1]}: expected contiguous, got strides"):
        MarlinMoELayer.from_marlin(**given)


@pytest.mark.parametrize("name", ["w13_qweight", "w2_scales"])
def test_lazily_negated_tensors_are_refused(name: str) -> None:
    """A kernel reads their bytes, which are not their values."""
    given = parts(random_layer())
    given[name] = torch._neg_view(given[name])
    part = name.split("_")[1]
    with pytest.raises(LayerError, match=rf"{part}: .* negated lazily\. Give {part}\.resolve_neg\(\)"):
        MarlinMoELayer.from_marlin(**given)


def test_sizes_and_bytes() -> None:
    layer = random_layer(
        num_experts=3, hidden_size=192, padded_intermediate_size=128, intermediate_size=80, symmetric=False
    )
    assert (layer.num_experts, layer.num_global_experts, layer.hidden_size) == (3, 3, 192)
    assert (layer.intermediate_size, layer.padded_intermediate_size) == (80, 128)
    assert (layer.w13.size_k, layer.w13.size_n, layer.w13.num_groups) == (192, 256, 6)
    assert (layer.w2.size_k, layer.w2.size_n, layer.w2.num_groups) == (128, 192, 4)
    assert [name for name, _ in layer.tensors()] == [
        f"{m}.{f}" for m in ("w13", "w2") for f in ("qweight", "scales", "zero_points")
    ]
    per_expert = (256 * 192 + 192 * 128) // 2 + (6 * 256 + 4 * 192) * 2 + (6 * 256 + 4 * 192) // 2
    assert layer.nbytes == 3 * per_expert


def test_from_marlin_takes_the_tensors_themselves() -> None:
    given = parts(random_layer(symmetric=False))
    layer = MarlinMoELayer.from_marlin(**given)
    assert layer.w13.qweight is given["w13_qweight"]
    assert layer.w2.zero_points is given["w2_zero_points"]
    assert layer.workspace is not None
    assert layer.recipe is None


def test_from_marlin_formats() -> None:
    of_w2 = parts(random_layer(bits=8, group_size=64, padded_intermediate_size=128))
    given = parts(random_layer(bits=4, group_size=32, padded_intermediate_size=128))
    given |= {name: tensor for name, tensor in of_w2.items() if name.startswith("w2_")}
    layer = MarlinMoELayer.from_marlin(**given, w2_bits=8, w2_group_size=64)
    assert str(layer.w13.format) == "int4, groups of 32, symmetric"
    assert str(layer.w2.format) == "int8, groups of 64, symmetric"
    single = parts(random_layer(group_size=None))
    for group_size in (None, -1, 128):  # K of w13 is 128, K of w2 64
        layer = MarlinMoELayer.from_marlin(**single | {"group_size": group_size})
        assert (layer.w13.format.group_size, layer.w2.format.group_size) == (None, None)


def test_to_is_a_new_layer() -> None:
    layer = random_layer(symmetric=False)
    moved = layer.to("cpu")
    assert moved is not layer
    assert moved.workspace is not None
    same_layer(moved, layer)
    meta = layer.to("meta")
    assert {tensor.device.type for _, tensor in meta.tensors()} == {"meta"}


def test_update_keeps_every_address() -> None:
    layer, other = (random_layer(seed, symmetric=False, group_size=None) for seed in (1, 2))
    addresses = {name: tensor.data_ptr() for name, tensor in layer.tensors()}
    assert layer.update_(other) is layer
    same_layer(layer, other)
    assert {name: tensor.data_ptr() for name, tensor in layer.tensors()} == addresses
    assert layer.w13.qweight.data_ptr() != other.w13.qweight.data_ptr()
    assert layer.update_(layer) is layer


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"num_experts": 4},
            r"w13\.qweight: expected torch.int32 \(5, 8, 256\).*got torch.int32 \(4, 8, 256\)",
        ),
        ({"symmetric": False}, "w2.zero_points: expected absent.*got torch.int32"),
        ({"dtype": torch.float16}, "w13.scales: expected torch.bfloat16"),
        ({"bits": 8}, "w13: expected int4, groups of 32, symmetric, got int8"),
        ({"intermediate_size": 40}, "intermediate_size: expected 64, got 40"),
    ],
)
def test_update_refuses_another_layer_and_writes_nothing(changes: dict[str, Any], text: str) -> None:
    layer, copy = random_layer(1), random_layer(1)
    with pytest.raises(LayerError, match=f"(?s)nothing was written.*{text}"):
        layer.update_(random_layer(2, **changes))
    same_layer(layer, copy)


def test_update_names_every_difference() -> None:
    with pytest.raises(LayerError) as caught:
        random_layer(1).update_(random_layer(2, symmetric=False, dtype=torch.float16))
    for name in ("w13.scales", "w2.scales", "w13.zero_points", "w2.zero_points", "w13: ", "w2: "):
        assert f"\n{name}" in str(caught.value), name


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"w13_scales": lambda t: t[:, :2]}, r"scales: expected K / group_size = 128 / 32 > 1 groups, got 2"),
        ({"w13_scales": lambda t: t.double()}, "scales: expected bfloat16, float16 or float32"),
        (
            {"w13_scales": lambda t: t[:, :, :64].contiguous()},
            r"scales: expected \(5, 4, 128\) beside qweight",
        ),
        (
            {"w13_qweight": lambda t: t.long()},
            r"qweight: expected int32 \[E, K/16, N\*4/2\], got torch.int64",
        ),
        ({"w13_qweight": lambda t: t[0]}, r"w13_qweight: expected \[E, K/16, N\*bits/2\], got \(8, 256\)"),
        ({"w13_qweight": lambda t: t[:, :3]}, "qweight: expected K and N to be multiples of 64.*K=48"),
        ({"w2_qweight": lambda t: t[:4]}, r"scales: expected \(4, 2, 128\)"),
        (
            {"w2_scales": lambda t: t.half()},
            "w2.scales: expected torch.bfloat16 as w13's are, got torch.float16",
        ),
        ({"w2_bias": lambda _: torch.zeros(5, 64)}, r"bias: expected torch.bfloat16 \(5, 128\)"),
        (
            {"w13_zero_points": lambda _: torch.zeros(5, 4, 16).int()},
            "zero_points: expected exactly when asymm",
        ),
        (
            {"w13_scales": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2)},
            "scales: expected contiguous, got strides",
        ),
    ],
)
def test_tensors_that_do_not_fit(changes: dict[str, Any], text: str) -> None:
    given = parts(random_layer())
    given |= {name: change(given[name]) for name, change in changes.items()}
    with pytest.raises(LayerError, match=text):
        MarlinMoELayer.from_marlin(**given)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"intermediate_size": 65}, r"intermediate_size: expected within \(0, 64\].*got 65"),
        ({"intermediate_size": 0}, "intermediate_size: .*got 0"),
        ({"num_global_experts": 4}, "num_global_experts: expected at least the layer's 5.*got 4"),
        ({"max_tokens": 0}, "max_tokens: expected at least 1, got 0"),
        ({"top_k": 6}, r"top_k: expected 1 \.\. 5"),
        ({"gated": False}, r"w2: expected \[E=5, N=H=128, K=Ip\] with w13's N = 1 \* Ip.*w13's N=128"),
        ({"expert_map": torch.zeros(4, dtype=torch.int32)}, r"expert_map: expected int32 \(5,\)"),
        ({"expert_map": torch.zeros(5)}, "expert_map: expected int32.*got torch.float32"),
        ({"intermediate_order": torch.zeros(5, 32).int()}, r"intermediate_order: expected int32 \(5, 64\)"),
    ],
)
def test_facts_that_do_not_fit(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(LayerError, match=text):
        dataclasses.replace(random_layer(), **changes)


def test_all_problems_in_one_text() -> None:
    with pytest.raises(LayerError) as caught:
        dataclasses.replace(random_layer(), max_tokens=0, top_k=99, intermediate_size=500)
    assert [line.split(":")[0] for line in str(caught.value).splitlines()] == [
        "intermediate_size",
        "max_tokens",
        "top_k",
    ]


@pytest.mark.parametrize(
    ("facts", "text"),
    [
        ({"bits": 3, "group_size": 32}, "bits: expected 4 or 8, which Marlin has, got 3"),
        ({"bits": 4, "group_size": 256}, "group_size: expected 32, 64, 128 or None.*got 256"),
        ({"bits": 4, "group_size": -1}, "got -1"),
    ],
)
def test_formats_that_marlin_has_not(facts: dict[str, Any], text: str) -> None:
    with pytest.raises(LayerError, match=text):
        QuantFormat(symmetric=True, **facts)


def test_shards() -> None:
    assert [Shard(rank, 3).bounds(8) for rank in range(3)] == [(0, 2), (2, 5), (5, 8)]
    for rank, size in ((1, 1), (-1, 2), (0, 0)):
        with pytest.raises(LayerError, match=f"0 <= rank < size, got rank {rank} of {size}"):
            Shard(rank, size)
    with pytest.raises(TypeError, match=r"Shard.size: expected an int, got str '2'"):
        Shard(0, "2")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"Shard.rank: expected an int, got bool True"):
        Shard(True, 2)


def test_a_layer_is_frozen() -> None:
    layer = random_layer()
    with pytest.raises(dataclasses.FrozenInstanceError):
        layer.top_k = 3  # type: ignore[misc]
    columns, ordered = random_bias(0, 5, 128, torch.bfloat16)
    biased = MarlinMoELayer.from_marlin(**parts(layer) | {"w13_bias": ordered})
    assert biased.w13.column_bias() is not None
    equal_bytes(biased.w13.column_bias(), columns.float(), "bias in column order")
    assert layer.w13.column_bias() is None


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("w13_qweight", None),
        ("w2_scales", 1.5),
        ("w13_bias", [1.0]),
        ("bits", 4.0),
        ("bits", True),
        ("group_size", "32"),
        ("symmetric", "yes"),
        ("gated", 1),
        ("intermediate_size", 127.5),
        ("max_tokens", "8"),
        ("top_k", "2"),
        ("expert_map", [0, 1]),
    ],
)
def test_from_marlin_names_the_argument_of_a_wrong_type(argument: str, value: object) -> None:
    with pytest.raises(TypeError, match=f"^{argument}: expected .*, got {type(value).__name__}"):
        MarlinMoELayer.from_marlin(**parts(random_layer()) | {argument: value})


def test_zero_bits_of_w2_are_not_the_default() -> None:
    with pytest.raises(LayerError, match="bits: expected 4 or 8, which Marlin has, got 0"):
        MarlinMoELayer.from_marlin(**parts(random_layer()), w2_bits=0)


@pytest.mark.parametrize("wrong", [-1, 5, 128], ids=["negative", "twice", "beyond K"])
def test_a_sort_order_that_is_no_permutation(wrong: int) -> None:
    layer = random_layer(num_experts=2)
    order = torch.arange(128, dtype=torch.int32).repeat(2, 1)
    order[1, 7] = wrong
    with pytest.raises(LayerError, match=r"w13\.sort_order: expected each of 0 \.\. 127 once"):
        MarlinMoELayer.from_marlin(**parts(layer), w13_sort_order=order)
    on_meta = {k: v.to("meta") if isinstance(v, torch.Tensor) else v for k, v in parts(layer).items()}
    MarlinMoELayer.from_marlin(**on_meta, w13_sort_order=order.to("meta"))


@pytest.mark.parametrize("wrong", [-2, 2])
def test_an_expert_map_beyond_the_layers_experts(wrong: int) -> None:
    local = torch.tensor([0, -1, wrong, 1], dtype=torch.int32)
    with pytest.raises(LayerError, match=rf"expert_map: expected -1 \.\. 1, .* got {wrong}"):
        MarlinMoELayer.from_marlin(**parts(random_layer(num_experts=2)), expert_map=local)


@pytest.mark.parametrize(
    ("experts", "error"),
    [
        ([True, False], TypeError),
        (torch.tensor([True, False]), TypeError),
        ([0.5], TypeError),
        (torch.tensor([1.0]), TypeError),
        ("01", TypeError),
        ([-1], LayerError),
        (torch.tensor([-1]), LayerError),
        ([2], LayerError),
        (torch.tensor([0, 2]), LayerError),
    ],
    ids=str,
)
def test_dequantize_takes_integer_indices_of_local_experts(experts: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="experts: expected"):
        random_layer(num_experts=2).dequantize(experts)


@pytest.mark.parametrize("device", ["bogus", "cuda:99", 99, -1])
def test_a_device_that_there_is_not(device: str | int) -> None:
    with pytest.raises(MarlinMoEError, match=rf"device: expected a device that there is \(cpu.*{device}"):
        random_layer().to(device)
    with pytest.raises(MarlinMoEError, match="device: expected a device that there is"):
        reserve(device, max_tokens=1, top_k=1)
    with pytest.raises(TypeError, match=r"device: expected a torch\.device, str or int, got NoneType"):
        random_layer().to(None)  # type: ignore[arg-type]


def test_update_takes_a_layer() -> None:
    with pytest.raises(TypeError, match="update_: other: expected MarlinMoELayer, got NoneType"):
        random_layer().update_(None)  # type: ignore[arg-type]
