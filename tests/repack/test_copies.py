"""Copies of loaded layers: pickled and deep copies are layers like any other, with their recipe."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from checkpoint_spec import CheckpointSpec
from checkpoints import make_source
from compare_layer import same_layer
from folders import golden_folders
from marlin_moe import (
    Context,
    MarlinMoELayer,
    Pipeline,
    QuantScheme,
    Stage,
    State,
    fused_marlin_moe,
    load_layers,
    process_weights,
    stage,
    update_weights_,
)
from marlin_moe.kernels.flat import unflatten
from marlin_moe.repack.packed.invert import repack_pipeline
from random_layer import random_calls, random_layer

SPEC = CheckpointSpec(num_experts=2, hidden_size=64, intermediate_size=64, extras=())
Copy = Callable[[MarlinMoELayer], MarlinMoELayer]


def through_pickle(layer: MarlinMoELayer) -> MarlinMoELayer:
    made: MarlinMoELayer = pickle.loads(pickle.dumps(layer))
    return made


COPIES: list[Copy] = [copy.deepcopy, through_pickle]


@pytest.mark.parametrize("copied", COPIES)
@pytest.mark.parametrize("path", golden_folders(), ids=lambda path: path.name)
def test_layers_of_real_checkpoints(path: Path, copied: Copy) -> None:
    for layer in load_layers(path).values():
        other = copied(layer)
        same_layer(other, layer)
        mine, theirs = (dict(each.tensors()) for each in (layer, other))
        assert all(mine[name].data_ptr() != theirs[name].data_ptr() for name in mine)
        assert other.recipe == layer.recipe
        assert other.workspace is not layer.workspace
        x, weights, ids = random_calls(0, 3, 2, layer)
        assert torch.equal(fused_marlin_moe(x, other, weights, ids), fused_marlin_moe(x, layer, weights, ids))


@pytest.mark.parametrize("copied", COPIES)
def test_the_registered_op_finds_a_copy(copied: Copy) -> None:
    layer = random_layer()
    other = copied(layer)
    assert unflatten(other.flat.tensors, other.flat.facts) is other
    assert unflatten(layer.flat.tensors, layer.flat.facts) is layer


@stage(reads=("w2_scales",), writes=("w2_scales",), whole_layer=True)
def doubled(state: State, context: Context) -> State:
    return state.evolve(w2_scales=state["w2_scales"] * 2)


@pytest.mark.parametrize("copied", COPIES)
def test_new_weights_go_through_the_copys_recipe(copied: Copy) -> None:
    first, second = make_source(SPEC), make_source(replace(SPEC, seed=9))
    (module,) = first.layers
    scheme = QuantScheme.from_config(first.config["quantization_config"], module)
    pipeline = Pipeline.default().insert_after("permute_bias", doubled)
    layer = process_weights(first.expert_tensors(module), scheme=scheme, pipeline=pipeline)
    other = copied(layer)
    update_weights_(other, second.expert_tensors(module))
    same_layer(other, process_weights(second.expert_tensors(module), scheme=scheme, pipeline=pipeline))
    same_layer(layer, process_weights(first.expert_tensors(module), scheme=scheme, pipeline=pipeline))


def test_stages_are_pickled_by_name() -> None:
    for each in (*Pipeline.default().stages, doubled):
        assert pickle.loads(pickle.dumps(each)) is each
    inverse = repack_pipeline()
    assert pickle.loads(pickle.dumps(inverse)) == inverse


def test_a_stage_without_a_name_can_be_copied() -> None:
    inner = Stage(name="inner", function=lambda state, context: state)
    pipeline = Pipeline.default().insert_after("gather", inner)
    assert copy.deepcopy(pipeline) == pipeline
    with pytest.raises((pickle.PicklingError, AttributeError), match="lambda"):
        pickle.dumps(pipeline)
