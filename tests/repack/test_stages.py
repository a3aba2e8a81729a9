"""All stages together against the oracle: TP and EP ranks, groups that a slice cuts, padding, orders."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

from checkpoints import CheckpointSpec, Source, make_source
from compare_layer import as_expected
from marlin_moe import MarlinMoELayer, QuantScheme, Shard, process_weights
from marlin_moe.repack.errors import ShardError
from oracle import Expert, Projection, Refused, expected_layer

SMALL = CheckpointSpec(num_experts=1, hidden_size=64, extras=())
SPECS = {
    "I/TP is the group size": replace(SMALL, intermediate_size=512, group_size=64, hidden_size=128),
    "I/TP is no multiple of 64": replace(SMALL, intermediate_size=96, group_size=32),
    "groups of 128 cut to 64 and 32": replace(SMALL, intermediate_size=384, group_size=128, hidden_size=128),
    "the same, asymmetric": replace(
        SMALL, intermediate_size=384, group_size=128, hidden_size=128, symmetric=False
    ),
    "groups of 64 cut to 32": replace(SMALL, intermediate_size=192, group_size=64, symmetric=False, bits=8),
    "one scale per column": replace(SMALL, intermediate_size=256, group_size=None),
    "one scale per column, asymmetric": replace(
        SMALL, intermediate_size=192, group_size=None, symmetric=False, bias=True
    ),
    "fields cut inside a word": replace(SMALL, intermediate_size=96, group_size=None, symmetric=False),
    "bytes cut inside a word": replace(
        SMALL, intermediate_size=48, group_size=None, symmetric=False, bits=8, bias=True
    ),
    "one group in the source": replace(SMALL, intermediate_size=128, group_size=128, hidden_size=128),
    "INT8": replace(SMALL, intermediate_size=256, group_size=32, bits=8),
    "INT8, asymmetric, fp16, bias": replace(
        SMALL, intermediate_size=320, group_size=32, bits=8, symmetric=False, dtype=torch.float16, bias=True
    ),
    "fp16 scales in a bf16 model": replace(
        SMALL, intermediate_size=128, group_size=32, scale_dtype=torch.float16
    ),
    "down of another format": replace(
        SMALL, intermediate_size=192, group_size=32, down_bits=8, down_group_size=None, symmetric=False
    ),
    "act-order": replace(
        SMALL, intermediate_size=256, group_size=32, actorder="group", bias=True, num_experts=2
    ),
    "act-order, asymmetric, INT8": replace(
        SMALL, intermediate_size=192, group_size=64, actorder="true", symmetric=False, bits=8, hidden_size=128
    ),
    "act-order with one group of K": replace(
        SMALL, intermediate_size=256, group_size=128, actorder=True, hidden_size=128, symmetric=False
    ),
}


def load(source: Source, *, tp: tuple[int, int] = (0, 1), ep: tuple[int, int] = (0, 1)) -> MarlinMoELayer:
    (module,) = source.layers
    scheme = QuantScheme.from_config(source.config["quantization_config"], module)
    return process_weights(source.expert_tensors(module), scheme=scheme, tp=Shard(*tp), ep=Shard(*ep))


def check(source: Source, *, tp: tuple[int, int] = (0, 1), ep: tuple[int, int] = (0, 1)) -> bool:
    """The rank's layer is the oracle's, or both refuse it; whether it exists."""
    (experts,) = source.layers.values()
    rank = {"tp_rank": tp[0], "tp_size": tp[1], "ep_rank": ep[0], "ep_size": ep[1]}
    try:
        expected = expected_layer(experts, **rank)
    except Refused:
        with pytest.raises(ShardError, match="TP sizes that work"):
            load(source, tp=tp, ep=ep)
        return False
    layer = load(source, tp=tp, ep=ep)
    assert (layer.tp, layer.ep) == (Shard(*tp), Shard(*ep))
    as_expected(layer, experts, act_order=source.spec.has_g_idx, expected=expected, **rank)
    return True


RANKS = {1: [0], 2: [0, 1], 4: [1, 3], 8: [0, 5, 7]}


@pytest.mark.parametrize("name", SPECS)
def test_tp_ranks(name: str) -> None:
    source = make_source(SPECS[name])
    sizes = []
    for size, ranks in RANKS.items():
        fits = {check(source, tp=(rank, size)) for rank in ranks}
        assert len(fits) == 1, f"ranks of {size} do not agree"
        sizes += [size] if fits == {True} else []
    expected = {
        "I/TP is no multiple of 64": [1],
        "groups of 128 cut to 64 and 32": [1, 2, 4],
        "the same, asymmetric": [1, 2, 4],
        "groups of 64 cut to 32": [1, 2],
        "INT8, asymmetric, fp16, bias": [1, 2],
        "fp16 scales in a bf16 model": [1, 2, 4],
        "act-order, asymmetric, INT8": [1, 2],
    }
    assert sizes == expected.get(name, [1, 2, 4, 8])


@pytest.mark.parametrize(("tp", "ep"), list(product((1, 2, 4, 8), (1, 2, 4))))
def test_every_split(tp: int, ep: int) -> None:
    """Five experts, so that EP ranks have different numbers of them; the last rank of each size."""
    source = make_source(replace(SPECS["act-order"], num_experts=5, symmetric=False, seed=3))
    assert check(source, tp=(tp - 1, tp), ep=(ep - 1, ep))


@pytest.mark.parametrize("ep", [2, 3, 5])
def test_every_ep_rank(ep: int) -> None:
    source = make_source(replace(SMALL, num_experts=5, intermediate_size=64, symmetric=False, seed=4))
    for rank in range(ep):
        assert check(source, ep=(rank, ep))
    assert sum(load(source, ep=(rank, ep)).num_experts for rank in range(ep)) == 5


def test_more_ep_ranks_than_experts() -> None:
    source = make_source(replace(SMALL, num_experts=2))
    for rank in range(3):  # also on those that would have one: ranks must agree
        with pytest.raises(ShardError, match=r"at least one expert .*got 2 .*ep=3.*up to 2 work"):
            load(source, ep=(rank, 3))


@pytest.mark.parametrize(
    ("name", "works"),
    [
        ("groups of 128 cut to 64 and 32", "1, 2, 3, 4, 6, 12"),
        ("groups of 64 cut to 32", "1, 2, 3, 6"),
        ("fields cut inside a word", "1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48"),
        ("act-order", "1, 2, 4, 8"),
    ],
)
def test_a_refusal_names_the_sizes_that_work(name: str, works: str) -> None:
    source = make_source(SPECS[name])
    with pytest.raises(ShardError) as caught:
        load(source, tp=(1, 5))
    text = str(caught.value)
    size = source.spec.intermediate_size
    assert re.search(
        rf"experts: expected the intermediate size {size} to split over tp=5.*not divisible", text
    )
    assert f"TP sizes that work: {works}." in text
    for tp in range(1, 13):
        if str(tp) in works.split(", "):
            assert load(source, tp=(tp - 1, tp)).intermediate_size == size // tp
        else:
            with pytest.raises(ShardError, match=f"over tp={tp},"):
                load(source, tp=(tp - 1, tp))


def test_a_refusal_says_which_group_is_cut() -> None:
    source = make_source(SPECS["groups of 128 cut to 64 and 32"])
    with pytest.raises(ShardError, match="a slice of 48 cuts groups of 128 and is no multiple of 64 or 32"):
        load(source, tp=(0, 8))


def test_what_stands_behind_the_last_field_of_a_word_is_not_read() -> None:
    """I = 12: the second word of w2's columns, and of zero points, holds 4 fields that are no one's."""
    source = make_source(
        replace(SMALL, intermediate_size=16, group_size=None, symmetric=False, weight_shape=None)
    )
    (module,) = source.layers
    tensors = source.expert_tensors(module)
    for projection in ("gate_proj", "up_proj"):
        for part in ("weight_packed", "weight_scale"):
            tensors[f"0.{projection}.{part}"] = tensors[f"0.{projection}.{part}"][:12]

    def cut(expert: Expert) -> Expert:
        def rows(projection: Projection) -> Projection:
            return projection.rows(list(range(12)))

        return Expert(
            gate=rows(expert.gate),
            up=rows(expert.up),
            down=replace(expert.down, values=expert.down.values[:, :12]),
        )

    experts = [cut(expert) for expert in source.layers[module]]
    scheme = QuantScheme.from_config(source.config["quantization_config"], module)
    for size in (1, 2, 3, 4):
        for rank in range(size):
            layer = process_weights(tensors, scheme=scheme, tp=Shard(rank, size))
            as_expected(layer, experts, tp_rank=rank, tp_size=size)


def test_padding_is_zero_and_the_scale_per_column_stays() -> None:
    layer = load(make_source(SPECS["fields cut inside a word"]), tp=(1, 8))
    assert (layer.intermediate_size, layer.padded_intermediate_size) == (12, 64)
    dense = layer.w13.dequantize(torch.arange(1)).view(1, 2, 64, 64)
    assert (dense[:, :, 12:] == 0).all()
    assert (dense[:, :, :12] != 0).any()
    assert (layer.w2.scales != 0).all()
    assert layer.w2.num_groups == 1


def test_regrouped_scales_are_repeated() -> None:
    layer = load(make_source(SPECS["groups of 128 cut to 64 and 32"]), tp=(1, 2))
    assert layer.w2.format.group_size == 64
    scales = layer.w2.scales  # columns 192 … 383 in groups of 64: source groups 1, 2, 2
    assert torch.equal(scales[:, 1], scales[:, 2])
    assert not torch.equal(scales[:, 0], scales[:, 1])


def test_biases_of_ranks_add_up() -> None:
    """w2's bias is added by one TP rank alone."""
    source = make_source(SPECS["act-order"])
    biases = [load(source, tp=(rank, 4)).w2.column_bias() for rank in range(4)]
    whole = load(source).w2.column_bias()
    assert whole is not None
    assert (whole != 0).any()
    assert torch.equal(sum(bias for bias in biases if bias is not None), whole)


@pytest.mark.parametrize("size", [2, 4])
def test_orders_of_ranks_make_up_the_whole(size: int) -> None:
    source = make_source(SPECS["act-order"])
    whole = load(source).intermediate_order
    ranks: list[Any] = [load(source, tp=(rank, size)).intermediate_order for rank in range(size)]
    assert whole is not None
    assert torch.equal(torch.cat(ranks, 1), whole)
    assert not torch.equal(whole[0], whole[1]), "the experts should differ in order"
    assert [sorted(row) for row in whole.tolist()] == [list(range(256))] * 2
