"""A stage of a user's own: what it declares is what it must do."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from compare_layer import equal_bytes
from marlin_moe import (
    Context,
    Pipeline,
    State,
    stage,
)
from marlin_moe.repack.errors import PipelineError
from small_pipelines import MODULE, load


def test_an_added_stage_of_the_whole_layer() -> None:
    @stage(reads=("w2_scales",), writes=("w2_scales",), whole_layer=True)
    def largest_first(state: State, context: Context) -> State:
        assert len(state["w2_scales"]) == len(state.experts) == 2
        return state.evolve(w2_scales=state["w2_scales"].flip(0))

    plain, flipped = load(None), load(Pipeline.default().insert_after("permute_bias", largest_first))
    equal_bytes(flipped.w2.scales, plain.w2.scales.flip(0), "w2.scales")
    equal_bytes(flipped.w13.scales, plain.w13.scales, "w13.scales")


def test_a_bare_function_is_no_stage() -> None:
    with pytest.raises(TypeError, match=r"Pipeline: expected Stage objects, got function .*Decorate it"):
        Pipeline.default().insert_after("gather", lambda state, context: state)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("declared", "result", "text"),
    [
        ({}, lambda s: None, "broken: expected the stage to return a State, got NoneType"),
        ({}, lambda s: s.fields, "broken: expected the stage to return a State, got dict"),
        ({}, lambda s: s.evolve(extra=torch.ones(1)), r"broken: .*writes nothing.*wrote undeclared extra"),
        (
            {"reads": ("w2_weight_scale",)},
            lambda s: s.evolve(w2_weight_scale=s["w2_weight_scale"] * 2),
            "broken: .*but it wrote undeclared w2_weight_scale",
        ),
        (
            {"writes": ("extra",)},
            lambda s: s,
            r"broken: .*writes extra; drops nothing.*but it did not write extra",
        ),
        ({"drops": ("w2_weight_bias",)}, lambda s: s, "broken: .*but it did not drop w2_weight_bias"),
        (
            {},
            lambda s: s.evolve(drop=("w2_weight_bias",)),
            "broken: .*but it dropped undeclared w2_weight_bias",
        ),
        ({}, lambda s: s["w2_wait"], "w2_wait: expected a stage before this one to write it, got w13_weight"),
    ],
)
def test_stages_that_do_not_keep_their_word(declared: dict[str, Any], result: Any, text: str) -> None:
    bad = stage(name="broken", **declared)(lambda state, context: result(state))
    with pytest.raises(PipelineError, match=f"(?s){text}"):
        load(Pipeline.default().insert_after("gather", bad))


def test_a_stage_that_decides_by_values() -> None:
    """Shapes are learnt on meta tensors; another shape or field on real ones is an error, not garbage."""

    def deciding(result: Any) -> Pipeline:
        made = stage(
            name="deciding", reads=("w2_scales",), writes=("w2_scales",), writes_optional=("w2_more",)
        )(lambda state, context: state if context.device.type == "meta" else result(state))
        return Pipeline.default().insert_after("permute_scales", made)

    with pytest.raises(
        PipelineError, match=rf"{MODULE}|experts\.w2_scales: expected .* as on meta tensors, got"
    ):
        load(deciding(lambda state: state.evolve(w2_scales=state["w2_scales"].float())))
    with pytest.raises(PipelineError, match=r"expected the fields .* as on meta tensors, got .*w2_more"):
        load(deciding(lambda state: state.evolve(w2_more=torch.ones(2))))
