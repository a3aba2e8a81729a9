"""Blocks of experts: the same bytes however many there are, and problems collected over all of them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

from checkpoints import CheckpointSpec, make_source
from compare_layer import equal_bytes
from marlin_moe import MarlinMoELayer, QuantScheme, Shard, process_weights
from marlin_moe.kernels.errors import MarlinMoEWarning
from marlin_moe.repack.assemble import assemble_layer
from marlin_moe.repack.blocks import LayerMemory, TensorSpec, blocks, run_blocks
from marlin_moe.repack.check import expert_facts
from marlin_moe.repack.errors import ExpertsError
from marlin_moe.repack.process import Recipe
from marlin_moe.repack.states import ExpertTensors, State

MODULE = "model.layers.0.mlp.experts"
SPEC = CheckpointSpec(
    num_experts=5, hidden_size=64, intermediate_size=96, symmetric=False, actorder="group", bias=True
)
Tensors = dict[str, torch.Tensor]


def recipe_of(spec: CheckpointSpec, **options: Any) -> Recipe:
    scheme = QuantScheme.from_config(make_source(spec).config["quantization_config"], MODULE)
    return Recipe(scheme=scheme, module=MODULE, **options)


def load(spec: CheckpointSpec, change: Callable[[Tensors], object], **options: Any) -> MarlinMoELayer:
    """The layer after `change` edited the tensors in place."""
    source = make_source(spec)
    tensors = source.expert_tensors(MODULE)
    change(tensors)
    scheme = QuantScheme.from_config(source.config["quantization_config"], MODULE)
    return process_weights(tensors, scheme=scheme, **options)


def in_blocks(
    recipe: Recipe, tensors: Tensors, block_bytes: int, memory: LayerMemory | None = None
) -> dict[str, torch.Tensor]:
    device = torch.device("cpu")
    experts = ExpertTensors.from_mapping(tensors, module=MODULE)
    facts = expert_facts(experts, recipe.scheme)
    context, memory = recipe.context(facts, device), memory or LayerMemory(device)
    result = run_blocks(recipe.pipeline, experts, facts, context, memory, block_bytes=block_bytes)
    state = State(experts=range(*recipe.ep.bounds(facts.num_experts)), facts=result, fields=memory.tensors)
    return dict(assemble_layer(state, context).tensors())


class Recording(LayerMemory):
    """Notes the calls, and hands out tensors that are full of rubbish."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.calls: list[tuple[str, int, int]] = []

    def allocate(self, specs: Mapping[str, TensorSpec]) -> None:
        super().allocate(specs)
        for tensor in self.tensors.values():
            tensor.view(torch.uint8).fill_(0xA5)

    def block(self, start: int, stop: int) -> Mapping[str, torch.Tensor]:
        self.calls.append(("block", start, stop))
        return super().block(start, stop)

    def commit(self, start: int, stop: int) -> None:
        self.calls.append(("commit", start, stop))


@pytest.mark.parametrize("rank", [{}, {"tp": Shard(1, 3)}, {"ep": Shard(1, 2)}], ids=str)
@pytest.mark.parametrize(
    "spec", [SPEC, replace(SPEC, actorder=None, bits=8, bias=False)], ids=["order", "int8"]
)
def test_one_expert_a_block_is_the_same_as_one_block(spec: CheckpointSpec, rank: dict[str, Shard]) -> None:
    tensors, recipe = make_source(spec).expert_tensors(MODULE), recipe_of(spec, **rank)
    whole = in_blocks(recipe, tensors, 1 << 30)
    per_expert = sum(tensor.nbytes for key, tensor in tensors.items() if key.startswith("0."))
    for block_bytes in (1, 2 * per_expert):
        memory = Recording()
        got = in_blocks(recipe, tensors, block_bytes, memory)
        assert got.keys() == whole.keys()
        for name, tensor in got.items():
            equal_bytes(tensor, whole[name], name)
        count = 3 if "ep" in rank else 5
        step = 1 if block_bytes == 1 else 2
        bounds = [(i, min(i + step, count)) for i in range(0, count, step)]
        assert memory.calls == [(call, *b) for b in bounds for call in ("block", "commit")]


def test_block_sizes() -> None:
    experts = ExpertTensors.from_mapping(make_source(SPEC).expert_tensors(MODULE))
    per_expert = sum(t.nbytes for key, t in make_source(SPEC).expert_tensors(MODULE).items() if key[0] == "1")
    assert list(blocks(experts, range(5), block_bytes=per_expert * 2)) == [range(2), range(2, 4), range(4, 5)]
    assert list(blocks(experts, range(5), block_bytes=per_expert * 2 - 1)) == [
        range(i, i + 1) for i in range(5)
    ]
    assert list(blocks(experts, range(3, 5), block_bytes=0)) == [range(3, 4), range(4, 5)]


def edited(**changes: Callable[[torch.Tensor], object]) -> Callable[[Tensors], object]:
    """Edit tensors in place: `e1_gate_proj_weight_scale` is "1.gate_proj.weight_scale"."""

    def change(tensors: Tensors) -> None:
        for name, edit in changes.items():
            expert, which, part = re.fullmatch(r"e(\d)_(gate|up|down)_proj_(\w+)", name).groups()  # type: ignore[union-attr]
            edit(tensors[f"{expert}.{which}_proj.{part}"])

    return change


def put(value: float) -> Callable[[torch.Tensor], object]:
    return lambda tensor: tensor.view(-1)[3:5].fill_(value)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_scales_that_are_no_numbers(value: float) -> None:
    for options in ({}, {"allow_dead_experts": True}):
        with pytest.raises(ExpertsError) as caught:
            load(SPEC, edited(e3_up_proj_weight_scale=put(value)), **options)
        text = str(caught.value)
        assert text.startswith("experts.3.up_proj.weight_scale: expected finite values")
        assert "got 2 NaN or Inf among 192" in text
        assert "\n" not in text


def test_a_bias_that_is_no_number() -> None:
    with pytest.raises(
        ExpertsError, match=r"experts\.0\.down_proj\.bias: expected finite.*got 2 NaN or Inf among 64"
    ):
        load(SPEC, edited(e0_down_proj_bias=put(float("nan"))))
    assert load(SPEC, edited(e0_down_proj_bias=torch.Tensor.zero_)).w2.bias is not None


def test_a_projection_that_calibration_never_reached() -> None:
    change = edited(e2_gate_proj_weight_scale=torch.Tensor.zero_)
    with pytest.raises(ExpertsError, match=r"experts\.2\.gate_proj\.weight_scale: .*allow_dead_experts"):
        load(SPEC, change)
    w13, _ = load(SPEC, change, allow_dead_experts=True).dequantize()
    assert (w13[2, :96] == 0).all()
    assert (w13[2, 96:] != 0).any()
    load(SPEC, edited(e2_gate_proj_weight_scale=lambda t: t[:-1].zero_()))  # some zeros are no problem


def test_other_ranks_experts_are_not_read() -> None:
    change = edited(e4_up_proj_weight_scale=put(float("nan")))
    assert load(SPEC, change, ep=Shard(0, 2)).num_experts == 2
    with pytest.raises(ExpertsError, match=r"experts\.4\.up_proj"):
        load(SPEC, change, ep=Shard(1, 2))


def swap(tensor: torch.Tensor) -> None:
    """Two columns of different groups, in a tensor of groups of 32."""
    other = int((tensor != tensor[0]).nonzero()[0])
    tensor[[0, other]] = tensor[[other, 0]]


def test_g_idx_that_cannot_be() -> None:
    names = ("e1_gate_proj_weight_g_idx", "e1_up_proj_weight_g_idx")

    def refused(edit: Callable[[torch.Tensor], object], **options: Any) -> str:
        with pytest.raises(ExpertsError) as caught:
            load(SPEC, edited(**dict.fromkeys(names, edit)), **options)
        headline, *lines = str(caught.value).splitlines()
        assert headline == "experts: 2 problems."
        assert [line.split(":")[0] for line in lines] == [
            f"experts.1.w13 g_idx ({p})" for p in ("gate", "up")
        ]
        return lines[0]

    assert "got values from -1 to 1" in refused(lambda t: t[0].fill_(-1))
    assert "got values from 0 to 2" in refused(lambda t: t[0].fill_(2))
    assert "got values from -1 to -1" in refused(lambda t: t.fill_(-1))
    text = refused(lambda t: t[int((t == 0).int().argmax())].fill_(1))
    assert "expected g_idx to name each of 2 groups 32 times" in text
    assert "got groups of 31 to 33 columns" in text
    with pytest.raises(
        ExpertsError, match=r"experts\.2\.w2 g_idx \(down\): .*3 groups 32 times.*got groups of 0 to 96"
    ):
        load(SPEC, edited(e2_down_proj_weight_g_idx=torch.Tensor.zero_))


def test_gate_and_up_of_different_orders() -> None:
    with pytest.raises(
        ExpertsError, match=r"experts\.4\.w13 g_idx: expected gate and up to share their order"
    ):
        load(SPEC, edited(e4_up_proj_weight_g_idx=swap))
    load(SPEC, edited(e4_up_proj_weight_g_idx=swap, e4_gate_proj_weight_g_idx=swap))


def test_an_order_that_the_config_does_not_declare() -> None:
    source = make_source(SPEC)
    source.config["quantization_config"]["config_groups"]["group_0"]["weights"]["actorder"] = "weight"
    scheme = QuantScheme.from_config(source.config["quantization_config"], MODULE)
    tensors = source.expert_tensors(MODULE)
    with pytest.raises(ExpertsError) as caught:
        process_weights(tensors, scheme=scheme)
    assert str(caught.value).count("expected g_idx[k] = k div 32, because the config declares no") == 10
    for key in tensors:
        if key.endswith("g_idx"):
            tensors[key] = (torch.arange(96 if "down" in key else 64) // 32).int()
    layer = process_weights(tensors, scheme=scheme)
    assert (layer.w13.sort_order, layer.intermediate_order) == (None, None)


def test_problems_of_all_blocks_in_one_text() -> None:
    change = edited(
        e0_up_proj_weight_scale=put(float("nan")),
        e2_down_proj_weight_g_idx=torch.Tensor.zero_,
        e4_gate_proj_weight_scale=torch.Tensor.zero_,
    )
    tensors = make_source(SPEC).expert_tensors(MODULE)
    change(tensors)
    for block_bytes in (1, 1 << 30):
        with pytest.raises(ExpertsError) as caught:
            in_blocks(recipe_of(SPEC), tensors, block_bytes)
        headline, *lines = str(caught.value).splitlines()
        assert headline == f"{MODULE}: 3 problems."
        starts = {line.removeprefix(f"{MODULE}.")[0] for line in lines}
        assert starts == {"0", "2", "4"}


def test_scales_out_of_the_range_of_the_dtype_asked_for() -> None:
    change = edited(e1_up_proj_weight_scale=put(1e30), e3_up_proj_weight_scale=put(1e-30))
    with pytest.warns(
        MarlinMoEWarning, match="scales are converted once, from torch.bfloat16 to torch.float16"
    ):
        layer = load(SPEC, lambda _: None, dtype=torch.float16)
    assert (layer.w13.scales.dtype, layer.w2.scales.dtype) == (torch.float16, torch.float16)
    assert layer.w13.bias is not None
    assert layer.w13.bias.dtype == torch.float16
    with (
        pytest.warns(MarlinMoEWarning, match="converted"),
        pytest.raises(
            ExpertsError, match=r"experts\.w13_scales: expected values within .*float16, got 4 that over"
        ),
    ):
        load(SPEC, change, dtype=torch.float16)
    load(SPEC, change, dtype=torch.bfloat16)
