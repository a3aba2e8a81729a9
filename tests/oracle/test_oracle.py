"""The oracle against values that it did not make: public Marlin bytes, exact weights, float64 outputs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from folders import checkpoint_folders
from oracle import (
    ExpectedLayer,
    Expert,
    Projection,
    Refused,
    expected_dense,
    expected_layer,
    marlin_bias,
    marlin_qweight,
    marlin_scales,
    marlin_zero_points,
    moe,
    scales_of_marlin,
    values_of_marlin,
    zero_points_of_marlin,
)
from oracle_folder import PROJECTION_NAMES, read_expected, read_experts, sha256

FOLDERS = pytest.mark.parametrize("folder", checkpoint_folders(), ids=lambda path: path.name)


@FOLDERS
def test_dequantized_values(folder: Path) -> None:
    expected = read_expected(folder)
    modules = {name.rsplit(".", 3)[0] for name in expected.dense_sha256}
    assert expected.module in modules
    seen = set()
    for module in modules:
        for number, expert in enumerate(read_experts(folder, module)):
            for kind, spellings in PROJECTION_NAMES.items():
                names = [f"{module}.{number}.{spelling}.weight" for spelling in spellings]
                (name,) = [name for name in names if name in expected.dense_sha256]
                assert sha256(getattr(expert, kind).dense()) == expected.dense_sha256[name], name
                seen.add(name)
    assert seen == set(expected.dense_sha256)


@FOLDERS
def test_marlin_bytes(folder: Path) -> None:
    expected = read_expected(folder)
    if not expected.marlin_sha256:
        pytest.skip("no Marlin bytes beside this checkpoint")
    layer = expected_layer(read_experts(folder, expected.module))
    for name, digest in expected.marlin_sha256.items():
        matrix, field = name.split("_", 1)
        tensor = getattr(getattr(layer, matrix), field)
        assert sha256(tensor) == digest, name
        if name in expected.marlin:
            assert torch.equal(tensor, expected.marlin[name]), name
    assert expected.marlin.keys() <= expected.marlin_sha256.keys()


@FOLDERS
def test_output_from_dense_weights(folder: Path) -> None:
    expected = read_expected(folder)
    w13, w2 = expected_dense(read_experts(folder, expected.module))
    y = moe(expected.x, w13, w2, expected.topk_ids, expected.topk_weights)
    assert ((y - expected.y.double()).norm() / expected.y.double().norm()).item() < 1e-7


@FOLDERS
@pytest.mark.parametrize(("tp", "ep"), [(2, 1), (2, 4)])
def test_ranks_add_up(folder: Path, tp: int, ep: int) -> None:
    expected = read_expected(folder)
    experts = read_experts(folder, expected.module)
    y = torch.zeros_like(expected.y, dtype=torch.float64)
    for tp_rank in range(tp):
        for ep_rank in range(ep):
            rank = {"tp_rank": tp_rank, "tp_size": tp, "ep_rank": ep_rank, "ep_size": ep}
            try:
                layer = expected_layer(experts, **rank)
            except Refused:
                # Half of 96 columns holds no whole group of 32.
                assert (folder.name, tp) == ("qwen3moe-inter96-g32", 2)
                return
            w13, w2 = unpadded(layer)
            assert w2.shape == (len(experts) // ep, expected.x.shape[1], layer.intermediate_size)
            y += moe(
                expected.x, w13, w2, expected.topk_ids, expected.topk_weights, expert_map=layer.expert_map
            )
    assert ((y - expected.y.double()).norm() / expected.y.double().norm()).item() < 1e-7


def matrix(n: int, k: int, groups: int, *, bits: int = 4, zeros: bool = False, seed: int = 0) -> Projection:
    generator = torch.Generator().manual_seed(seed)
    return Projection(
        values=torch.randint(1 << bits, (n, k), generator=generator, dtype=torch.int32),
        scales=torch.rand(n, groups, generator=generator) + 0.5,
        bits=bits,
        zero_points=torch.randint(1 << bits, (n, groups), generator=generator, dtype=torch.int32)
        if zeros
        else None,
    )


def expert(intermediate_size: int, down_groups: int, *, hidden_size: int = 64, seed: int = 0) -> Expert:
    return Expert(
        gate=matrix(intermediate_size, hidden_size, 2, zeros=True, seed=seed),
        up=matrix(intermediate_size, hidden_size, 2, zeros=True, seed=seed + 1),
        down=matrix(hidden_size, intermediate_size, down_groups, zeros=True, seed=seed + 2),
    )


def unpadded(layer: ExpectedLayer) -> tuple[torch.Tensor, torch.Tensor]:
    """Dense weights out of a layer's Marlin tensors, without padding, w13's K in the source's order."""
    w13, w2, size = layer.w13.dense(), layer.w2.dense(), layer.intermediate_size
    padded = w2.shape[2]
    if layer.w13.sort_order is not None:
        w13 = w13.gather(2, layer.w13.sort_order.long().argsort(1)[:, None, :].expand_as(w13))
    for half in (w13[:, :padded], w13[:, padded:]):
        assert not half[:, size:].any(), "padded columns of w13 are not zero"
    if layer.w2.scales.shape[1] > 1:
        assert not w2[:, :, size:].any(), "padded rows of w2 are not zero"
    return torch.cat([w13[:, :size], w13[:, padded : padded + size]], 1), w2[:, :, :size]


@pytest.mark.parametrize(
    ("intermediate_size", "group", "tp", "expected_group"),
    [
        (96, 32, 1, 32),  # padded to 128: a fourth group, of zeros
        (96, 96, 1, None),  # one scale per column survives padding
        (128, 64, 2, None),  # I/TP equal to the group
        (128, 32, 4, 32),  # one group of 32, padded to two
        (192, 64, 2, 32),  # 96 cuts a group of 64: two halves each
        (640, 128, 2, 64),  # 320 cuts a group of 128
        (256, 256, 4, None),  # one group, on every rank
    ],
)
def test_slices(intermediate_size: int, group: int, tp: int, expected_group: int | None) -> None:
    """Groups of each rank, and its Marlin tensors decoded: exactly the source's columns and rows."""
    experts = [expert(intermediate_size, intermediate_size // group, seed=seed) for seed in (0, 9)]
    for rank in range(tp):
        layer = expected_layer(experts, tp_rank=rank, tp_size=tp)
        padded = layer.w2.qweight.shape[1] * 16
        assert padded % 64 == 0
        assert 0 <= padded - intermediate_size // tp < 64
        assert layer.w2.group_size == expected_group
        assert layer.w2.scales.shape[1] == (padded // expected_group if expected_group else 1)
        assert layer.w13.qweight.shape == (2, 4, 2 * padded * 2)
        for found, wanted in zip(
            unpadded(layer), expected_dense(experts, tp_rank=rank, tp_size=tp), strict=True
        ):
            assert torch.equal(found, wanted)


@pytest.mark.parametrize("tp", [1, 2])
def test_act_order(tp: int) -> None:
    """A different order in each expert: w2's folded into w13's columns, w13's own kept."""
    generator = torch.Generator().manual_seed(5)
    experts = []
    for seed in (0, 9):
        plain = expert(128, 4, seed=seed)
        of_hidden = (torch.arange(64) // 32)[torch.randperm(64, generator=generator)].int()
        of_intermediate = (torch.arange(128) // 32)[torch.randperm(128, generator=generator)].int()
        experts.append(
            Expert(
                gate=replace(plain.gate, g_idx=of_hidden),
                up=replace(plain.up, g_idx=of_hidden),
                down=replace(plain.down, g_idx=of_intermediate),
            )
        )
    for rank in range(tp):
        layer = expected_layer(experts, tp_rank=rank, tp_size=tp)
        assert layer.intermediate_order is not None
        assert layer.intermediate_order.shape == (2, 128 // tp)
        w13, w2 = expected_dense(experts, tp_rank=rank, tp_size=tp)
        if tp == 1:  # the dense weights are in the source's order, the layer's are sorted
            order = layer.intermediate_order.long()
            both = torch.cat([order, order + 128], 1)
            w13 = w13.gather(1, both[:, :, None].expand_as(w13))
            w2 = w2.gather(2, order[:, None, :].expand_as(w2))
        for found, wanted in zip(unpadded(layer), (w13, w2), strict=True):
            assert torch.equal(found, wanted)


@pytest.mark.parametrize("bits", [4, 8])
def test_layout_inverse(bits: int) -> None:
    source = matrix(128, 32, 2, bits=bits, zeros=True)
    assert source.zero_points is not None
    assert torch.equal(values_of_marlin(marlin_qweight(source.values, bits), bits), source.values)
    assert torch.equal(
        zero_points_of_marlin(marlin_zero_points(source.zero_points, bits), bits), source.zero_points
    )
    for groups in (1, 2):
        scales = source.scales[:, :groups]
        assert torch.equal(scales_of_marlin(marlin_scales(scales)), scales)


def test_words_by_hand() -> None:
    """Single words worked out on paper, for what no checkpoint here covers: 8 bits, and biases."""
    values = torch.tensor([[(16 * n + k) % 256 for k in range(16)] for n in range(64)], dtype=torch.int32)
    qweight = marlin_qweight(values, 8)
    assert qweight.shape == (1, 256)
    # Lane 1, j = 2, second word: n = 32 + 8. Lane 21, j = 3, first word: n = 48 + 5. Both k = 2, 10, 3, 11.
    for word, n in ((8 * 1 + 2 * 2 + 1, 40), (8 * 21 + 2 * 3, 53)):
        fields = [int(qweight[0, word]) >> shift & 255 for shift in (0, 8, 16, 24)]
        assert fields == [(16 * n + k) % 256 for k in (2, 10, 3, 11)]
    zeros = marlin_zero_points(torch.arange(64, dtype=torch.int32)[:, None], 8)
    # Positions 0 … 3 hold columns 0, 8, 16, 24; the word takes them in the order 0, 2, 1, 3.
    assert int(zeros[0, 0]) == 0 | 16 << 8 | 8 << 16 | 24 << 24
    assert int(zeros[0, 3]) == 33 | 49 << 8 | 41 << 16 | 57 << 24
    assert marlin_bias(torch.arange(64))[30:42].tolist() == [30, 31, 32, 33, 40, 41, 48, 49, 56, 57, 34, 35]


@pytest.mark.parametrize(
    ("intermediate_size", "group", "tp"), [(96, 32, 2), (128, 64, 8), (128, 64, 3), (64, 16, 1)]
)
def test_refused(intermediate_size: int, group: int, tp: int) -> None:
    with pytest.raises(Refused, match=r"cuts a group|not divisible|groups of 16"):
        expected_layer([expert(intermediate_size, intermediate_size // group)], tp_size=tp)


def test_skipped_ids_and_factors() -> None:
    one = expert(64, 2)
    w13, w2 = expected_dense([one, one])
    x = torch.randn(2, 64, generator=torch.Generator().manual_seed(3))
    ids, weights = torch.tensor([[0, -1], [-1, -1]]), torch.tensor([[0.5, 9.0], [9.0, 9.0]])
    y = moe(x, w13, w2, ids, weights, routed_scaling_factor=4.0)
    gate, up = (one.gate.dense().double() @ x[0].double()), (one.up.dense().double() @ x[0].double())
    torch.testing.assert_close(y[0], 2 * one.down.dense().double() @ (torch.nn.functional.silu(gate) * up))
    assert not y[1].any()
