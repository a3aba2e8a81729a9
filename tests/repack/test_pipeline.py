"""Pipelines of a user's own: stages removed, swapped, added, misplaced."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoints import CheckpointSpec, make_source
from compare_layer import as_expected, equal_bytes, same_layer
from marlin_moe import (
    Context,
    Pipeline,
    QuantScheme,
    Shard,
    Stage,
    State,
    stage,
    update_weights_,
)
from marlin_moe.kernels.errors import LayoutError
from marlin_moe.repack.blocks import plan
from marlin_moe.repack.check import expert_facts
from marlin_moe.repack.errors import PipelineError
from marlin_moe.repack.pipeline import STAGES, both
from marlin_moe.repack.states import ExpertTensors
from small_pipelines import MODULE, NAMES, PLAIN, SPEC, load


@stage(reads=both("weight_scale"), writes=both("weight_scale"))
def halve_scales(state: State, context: Context) -> State:
    return state.evolve({name: state[name] / 2 for name in both("weight_scale")})


def test_the_stages_in_order_are_files_of_their_names() -> None:
    assert NAMES == [
        "gather",
        "order",
        "shard",
        "pad",
        "repack_weights",
        "permute_scales",
        "permute_zero_points",
        "permute_bias",
        "attach_workspace",
    ]
    assert list(Pipeline.default().names) == NAMES
    assert list(Pipeline.offline().names) == NAMES[:-1]
    folder = Path(__file__).parents[2] / "repack" / "stages"
    assert {path.stem for path in folder.glob("[a-z]*.py")} == set(NAMES)


@pytest.mark.parametrize("place", ["gather", "order", "shard", "pad", "repack_weights"])
def test_an_added_stage(place: str) -> None:
    """Scales halved before, between or after the other stages: half the weights, exactly."""
    plain, halved = load(None), load(Pipeline.default().insert_after(place, halve_scales))
    for got, whole in zip(halved.dequantize(), plain.dequantize(), strict=True):
        equal_bytes(got, whole / 2, "weights")
    equal_bytes(halved.w13.qweight, plain.w13.qweight, "qweight")
    assert halved.workspace is not None


def test_an_added_stage_is_run_again_by_update_weights() -> None:
    layer = load(Pipeline.default().insert_after("gather", halve_scales))
    other = replace(SPEC, seed=5)
    update_weights_(layer, make_source(other).expert_tensors(MODULE))
    same_layer(layer, load(Pipeline.default().insert_after("gather", halve_scales), other))


def test_a_swapped_stage() -> None:
    """permute_scales written anew, straight into the destination, under another name."""

    @stage(reads=both("weight_scale"), writes=both("scales"), drops=both("weight_scale"))
    def my_scales(state: State, context: Context) -> State:
        from marlin_moe.kernels.layout import permute_scales

        written = {}
        for matrix in ("w13", "w2"):
            permuted = permute_scales(state[f"{matrix}_weight_scale"])
            slot = context.destination.get(f"{matrix}_scales")
            written[f"{matrix}_scales"] = permuted if slot is None else slot.copy_(permuted)
        return state.evolve(written, drop=both("weight_scale"))

    pipeline = Pipeline.default().replace("permute_scales", my_scales)
    assert "my_scales" in pipeline.names
    same_layer(load(pipeline), load(None))


@pytest.mark.parametrize(
    ("removed", "spec", "options"),
    [
        ("order", SPEC, {}),
        ("shard", SPEC, {}),
        ("shard", SPEC, {"ep": Shard(1, 2)}),
        ("pad", SPEC, {}),
        ("pad", SPEC, {"tp": Shard(1, 2)}),
        ("permute_zero_points", PLAIN, {}),
        ("permute_bias", PLAIN, {}),
    ],
)
def test_stages_that_a_layer_does_not_need(
    removed: str, spec: CheckpointSpec, options: dict[str, Any]
) -> None:
    same_layer(load(Pipeline.default().without(removed), spec, **options), load(None, spec, **options))


def test_without_a_workspace() -> None:
    layer = load(Pipeline.offline())
    assert layer.workspace is None
    as_expected(layer, make_source(SPEC).layers[MODULE])
    assert layer.with_workspace().workspace is not None


@pytest.mark.parametrize(
    ("removed", "spec", "options", "error", "text"),
    [
        (
            "pad",
            replace(SPEC, intermediate_size=96),
            {},
            PipelineError,
            "tiles of 64, got 96 .*Stage pad is missing",
        ),
        ("pad", PLAIN, {"tp": Shard(0, 4)}, PipelineError, "tiles of 64, got 32 .*Stage pad is missing"),
        ("pad", replace(PLAIN, group_size=None, intermediate_size=80), {}, LayoutError, "stage `pad`"),
        ("shard", PLAIN, {"tp": Shard(0, 2)}, PipelineError, "128 / tp 2, got 128. Stage shard is missing"),
        (
            "order",
            replace(PLAIN, actorder="group"),
            {},
            PipelineError,
            "got w13_weight_g_idx, w2_weight_g_idx",
        ),
        (
            "permute_zero_points",
            SPEC,
            {},
            PipelineError,
            "got w13_weight_zero_point, w2_weight_zero_point left by",
        ),
        (
            "permute_bias",
            SPEC,
            {},
            PipelineError,
            "got w13_weight_bias, w2_weight_bias left by gather, order",
        ),
    ],
)
def test_stages_that_a_layer_needs(
    removed: str, spec: CheckpointSpec, options: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        load(Pipeline.default().without(removed), spec, **options)


@pytest.mark.parametrize(
    ("removed", "text"),
    [
        (
            "gather",
            "order: expected w13_weight_packed, .* got expert_tensors. Stage gather writes it and is missing",
        ),
        (
            "repack_weights",
            "attach_workspace: expected w13_qweight, w2_qweight .*repack_weights writes it and is m",
        ),
        (
            "permute_scales",
            "attach_workspace: expected w13_scales, .*Stage permute_scales writes it and is missing",
        ),
    ],
)
def test_stages_that_every_layer_needs(removed: str, text: str) -> None:
    with pytest.raises(PipelineError, match=text):
        Pipeline.default().without(removed)
    with pytest.raises(PipelineError, match=f"Stage {removed} writes it and is missing"):
        Pipeline.default().without("attach_workspace", removed)


def moved(name: str, behind: str) -> tuple[Stage, ...]:
    chosen = next(item for item in STAGES if item.name == name)
    rest = [item for item in STAGES if item.name != name]
    rest.insert([item.name for item in rest].index(behind) + 1, chosen)
    return tuple(rest)


@pytest.mark.parametrize(
    ("name", "behind", "text"),
    [
        (
            "order",
            "shard",
            "shard: expected after order, got it before: gather, shard, order, .*Move it behind",
        ),
        ("shard", "pad", "pad: expected after shard, got it before"),
        ("gather", "order", "order: expected .*Stage gather writes it and is misplaced: it comes later"),
        ("pad", "repack_weights", "repack_weights: expected after pad"),
        ("shard", "permute_bias", "pad: expected after shard|repack_weights: expected after shard"),
        ("permute_scales", "gather", "permute_scales: expected after order, shard, pad"),
        ("permute_bias", "attach_workspace", "permute_bias: expected before the stages of the whole layer"),
        ("attach_workspace", "pad", "repack_weights: expected before the stages of the whole layer"),
    ],
)
def test_misplaced_stages(name: str, behind: str, text: str) -> None:
    with pytest.raises(PipelineError, match=text):
        Pipeline(moved(name, behind))


def test_a_stage_after_what_it_needs_was_dropped() -> None:
    with pytest.raises(
        PipelineError, match=r"halve_scales: expected w13_weight_scale, .*permute_scales dropped it"
    ):
        Pipeline.default().insert_after("permute_scales", halve_scales)


def test_the_same_stage_twice() -> None:
    pipeline = Pipeline.default().insert_after("gather", halve_scales)
    with pytest.raises(PipelineError, match="halve_scales: expected each stage once, got it twice"):
        pipeline.insert_after("order", halve_scales)


@pytest.mark.parametrize("change", ["without", "replace", "insert_after", "starting_with"])
def test_unknown_names(change: str) -> None:
    arguments: dict[str, Any] = {"replace": (halve_scales,), "insert_after": (halve_scales,)}
    options: dict[str, Any] = {"starting_with": {"inputs": ()}}
    with pytest.raises(
        PipelineError, match=r"padd: expected a stage of this pipeline .gather, order.*got none"
    ):
        getattr(Pipeline.default(), change)("padd", *arguments.get(change, ()), **options.get(change, {}))


def test_starting_with_a_later_stage() -> None:
    """States that are stacked and cut already, such as a packed checkpoint's, enter at `pad`."""
    source = make_source(SPEC)
    scheme = QuantScheme.from_config(source.config["quantization_config"], MODULE)
    tensors = ExpertTensors.from_mapping(source.expert_tensors(MODULE), module=MODULE)
    facts = expert_facts(tensors, scheme)
    context = Context(device=torch.device("cpu"), tp=Shard(0, 2), ep=Shard(0, 1), scheme=scheme)
    state = State(experts=range(2), facts=facts, fields={"expert_tensors": tensors})
    for item in STAGES[:3]:
        state = item(state, context)
    later = Pipeline.default().starting_with("pad", inputs=tuple(state.fields))
    assert later.names == tuple(NAMES[3:])
    got, whole = later.run_block(state, context), load(None, tp=Shard(0, 2))
    for matrix in ("w13", "w2"):
        for field in ("qweight", "scales", "zero_points", "bias"):
            equal_bytes(got[f"{matrix}_{field}"], getattr(getattr(whole, matrix), field), f"{matrix}_{field}")
    with pytest.raises(PipelineError, match=r"pad: expected w13_weight_packed, .*Stage gather writes it"):
        Pipeline.default().starting_with("pad", inputs=("expert_tensors",))


def test_a_plan_reads_nothing() -> None:
    class Untouched:
        fills_any_device = True

        def read_into(self, name: str, out: torch.Tensor) -> None:
            raise AssertionError(f"{name} was read")

        def read_all(self, wanted: Iterable[tuple[str, torch.Tensor]]) -> None:
            raise AssertionError(f"{list(wanted)} were read")

    source = make_source(replace(SPEC, weight_shape=None))
    scheme = QuantScheme.from_config(source.config["quantization_config"], MODULE)
    tensors = replace(ExpertTensors.from_mapping(source.expert_tensors(MODULE)), source=Untouched())
    context = Context(device=torch.device("cpu"), tp=Shard(0, 4), ep=Shard(0, 1), scheme=scheme)
    result = plan(Pipeline.default(), tensors, expert_facts(tensors, scheme), context)
    assert {tensor.device.type for _, tensor in result.tensors()} == {"meta"}
    assert tuple(result["w13_qweight"].shape) == (1, 4, 256)
    assert (result.facts.intermediate_size, result.facts.padded_intermediate_size) == (32, 64)


@pytest.mark.parametrize("stages", [None, 5])
def test_stages_that_are_none(stages: Any) -> None:
    with pytest.raises(TypeError, match="Pipeline: stages: expected Iterable, got"):
        Pipeline(stages)
