"""process_weights and update_weights_: tensors in memory, nothing written to them, new weights in place."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

from checkpoint_spec import CheckpointSpec
from checkpoints import Source, make_source, write_source
from compare_layer import as_expected, equal_bytes, hashes, same_layer
from marlin_moe import MarlinMoELayer, QuantScheme, Shard, load_layers, process_weights, update_weights_
from marlin_moe.kernels.errors import LayerError
from marlin_moe.repack.errors import ExpertsError, MarlinMoEError, SchemeError, ShardError
from oracle import Refused, expected_layer
from random_layer import random_layer
from strategies import checkpoint_specs, ranks

SPEC = CheckpointSpec(
    num_experts=3, hidden_size=64, intermediate_size=96, symmetric=False, bias=True, actorder="group"
)
PLAIN = CheckpointSpec(num_experts=2, hidden_size=64, intermediate_size=64, extras=())


def scheme_of(source: Source) -> QuantScheme:
    (module,) = source.layers
    return QuantScheme.from_config(source.config["quantization_config"], module)


def tensors_of(source: Source) -> dict[str, torch.Tensor]:
    (module,) = source.layers
    return source.expert_tensors(module)


def load(source: Source, **options: Any) -> MarlinMoELayer:
    return process_weights(tensors_of(source), scheme=scheme_of(source), **options)


@pytest.mark.parametrize("rank", [{}, {"tp": Shard(2, 3)}, {"ep": Shard(1, 2), "tp": Shard(0, 3)}], ids=str)
@pytest.mark.parametrize("shards", [1, 3])
def test_the_same_layer_as_from_a_directory(tmp_path: Path, shards: int, rank: dict[str, Shard]) -> None:
    source = write_source(tmp_path, make_source(replace(SPEC, shards=shards)))
    (loaded,) = load_layers(tmp_path, **rank, max_tokens=32).values()  # type: ignore[arg-type]
    same_layer(load(source, **rank, max_tokens=32, top_k=2), loaded)


def test_tensors_given_stay_as_they_are() -> None:
    for spec in (SPEC, PLAIN, replace(PLAIN, bits=8, group_size=None)):
        source = make_source(spec)
        tensors = tensors_of(source)
        before = hashes(tensors)
        layer = load(source, tp=Shard(1, 3 if spec is SPEC else 2))
        assert hashes(tensors) == before
        for _, tensor in layer.tensors():
            tensor.zero_()  # nor do they share memory
        assert hashes(tensors) == before


def test_tensors_may_have_any_strides_and_be_parameters() -> None:
    source = make_source(SPEC)
    tensors = tensors_of(source)
    expected = load(source)
    odd: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if tensor.dim() == 2:
            tensor = tensor.T.contiguous().T
        floating = tensor.is_floating_point()
        odd[name] = torch.nn.Parameter(tensor, requires_grad=floating)
    layer = process_weights(odd, scheme=scheme_of(source))
    same_layer(layer, expected)
    assert not any(tensor.requires_grad for _, tensor in layer.tensors())


def test_the_order_of_names_makes_no_difference() -> None:
    source = make_source(SPEC)
    backwards = dict(reversed(tensors_of(source).items()))
    same_layer(process_weights(backwards, scheme=scheme_of(source)), load(source))


def test_facts_of_the_layer() -> None:
    layer = load(make_source(PLAIN), top_k=2, max_tokens=17, ep=Shard(1, 2))
    assert (layer.top_k, layer.max_tokens) == (2, 17)
    assert (layer.num_experts, layer.num_global_experts) == (1, 2)
    assert layer.expert_map is not None
    assert layer.expert_map.tolist() == [-1, 0]
    assert layer.workspace is not None
    with pytest.raises(LayerError, match=r"top_k: expected 1 \.\. 2"):
        load(make_source(PLAIN), top_k=3)
    with pytest.raises(ExpertsError, match=r"dtype: expected torch\.bfloat16, .*got torch\.int8"):
        load(make_source(PLAIN), dtype=torch.int8)


@pytest.mark.parametrize(
    ("experts", "text"),
    [
        ({}, "expected names below the experts module, such as .*got no tensors"),
        ({"gate.weight": torch.zeros(1)}, "got gate.weight"),
        ({"layers.0.gate_proj.weight_packed": torch.zeros(1)}, "got layers.0.gate_proj.weight_packed"),
    ],
)
def test_mappings_that_hold_no_experts(experts: dict[str, torch.Tensor], text: str) -> None:
    with pytest.raises(ExpertsError, match=f"experts: .*{text}"):
        process_weights(experts, scheme=scheme_of(make_source(SPEC)))


def test_wrong_types() -> None:
    scheme = scheme_of(make_source(SPEC))
    with pytest.raises(TypeError, match=r"experts\.0\.w1\.weight_packed: expected a torch\.Tensor, got list"):
        process_weights({"0.w1.weight_packed": [1]}, scheme=scheme)  # type: ignore[dict-item]
    with pytest.raises(TypeError, match="scheme: expected a QuantScheme, got dict"):
        process_weights({}, scheme={})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"experts: expected a mapping of names to tensors.*got list"):
        process_weights([], scheme=scheme)  # type: ignore[arg-type]
    tensors = tensors_of(make_source(SPEC))
    with pytest.raises(TypeError, match="tp: expected a Shard, got int 2"):
        process_weights(tensors, scheme=scheme, tp=2)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="pipeline: expected a Pipeline, got tuple"):
        process_weights(tensors, scheme=scheme, pipeline=("gather",))  # type: ignore[arg-type]


@pytest.mark.parametrize("rank", [{}, {"tp": Shard(1, 3), "ep": Shard(0, 2)}], ids=str)
def test_update_is_a_fresh_layer_in_the_old_storage(rank: dict[str, Shard]) -> None:
    layer, other = load(make_source(SPEC), **rank), make_source(replace(SPEC, seed=9))
    addresses = {name: tensor.data_ptr() for name, tensor in layer.tensors()}
    workspace = layer.workspace
    before = hashes(tensors_of(other))
    assert update_weights_(layer, tensors_of(other)) is layer
    same_layer(layer, load(other, **rank))
    assert {name: tensor.data_ptr() for name, tensor in layer.tensors()} == addresses
    assert layer.workspace is workspace
    assert hashes(tensors_of(other)) == before


def test_update_of_a_loaded_layer(tmp_path: Path) -> None:
    write_source(tmp_path, make_source(SPEC))
    (layer,) = load_layers(tmp_path).values()
    other = make_source(replace(SPEC, seed=9))
    update_weights_(layer, tensors_of(other))
    as_expected(layer, next(iter(other.layers.values())), act_order=True)


def spoiled(key: str, change: Any) -> dict[str, torch.Tensor]:
    tensors = tensors_of(make_source(replace(SPEC, seed=9)))
    return tensors | {key: change(tensors[key])}


@pytest.mark.parametrize(
    ("tensors", "error", "text"),
    [
        (
            spoiled("2.up_proj.weight_scale", lambda t: t * float("nan")),
            ExpertsError,
            r"2\.up_proj\.weight_scale",
        ),
        (spoiled("2.up_proj.weight_packed", lambda t: t[1:]), ExpertsError, r"mlp\.experts\.2\.up_proj"),
        (spoiled("2.down_proj.weight_g_idx", lambda t: t * 0), ExpertsError, "w2 g_idx"),
        (tensors_of(make_source(replace(SPEC, num_experts=2))), LayerError, r"w13\.qweight: expected .*got"),
        (tensors_of(make_source(replace(SPEC, intermediate_size=64))), LayerError, "intermediate_size"),
        (
            tensors_of(make_source(replace(SPEC, dtype=torch.float16))),
            LayerError,
            r"w13\.scales: expected torch\.bf",
        ),
    ],
)
def test_an_update_that_fails_leaves_the_layer(
    tensors: dict[str, torch.Tensor], error: type[Exception], text: str
) -> None:
    source = make_source(SPEC)
    (module,) = source.layers
    scheme = scheme_of(source)
    layer, copy = load(source), load(source)
    named = replace(layer, recipe=replace(layer.recipe, module=module, scheme=scheme))
    with pytest.raises(error, match=f"(?s){text}"):
        update_weights_(named, tensors)
    same_layer(layer, copy)


def test_a_layer_without_a_recipe_refuses_checkpoint_tensors() -> None:
    layer, copy = random_layer(1), random_layer(1)
    with pytest.raises(
        SchemeError, match=r"layer: expected one made by load_layers or process_weights.*update_"
    ):
        update_weights_(layer, tensors_of(make_source(PLAIN)))
    same_layer(layer, copy)


def test_an_updated_layer_on_another_device_keeps_its_recipe() -> None:
    source, other = make_source(PLAIN), make_source(replace(PLAIN, seed=9))
    layer = update_weights_(load(source).to("cpu"), tensors_of(other))
    same_layer(layer, load(other))


@pytest.mark.parametrize("switch", ["0", "1"])
def test_both_paths_of_the_native_switch(switch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from marlin_moe.repack.native.path import native_path

    if switch == "1" and not native_path().used:
        pytest.skip(f"no C loop: {native_path().reason}")
    monkeypatch.setenv("MARLIN_MOE_NATIVE", switch)
    assert native_path().used == (switch == "1")
    for spec in (SPEC, replace(SPEC, bits=8, actorder=None), replace(SPEC, group_size=None, actorder=None)):
        source = make_source(spec)
        (experts,) = source.layers.values()
        for rank in range(3):
            layer = load(source, tp=Shard(rank, 3))
            as_expected(layer, experts, act_order=spec.has_g_idx, tp_rank=rank, tp_size=3)


@hypothesis.settings(
    max_examples=200,
    deadline=None,
    derandomize=bool(os.environ.get("CI")),
    suppress_health_check=list(hypothesis.HealthCheck),
)
@hypothesis.given(
    spec=checkpoint_specs(actorder=True, mixed=True), rank=ranks(), path=st.sampled_from(["dict", "files"])
)
def test_any_checkpoint_and_any_rank(
    tmp_path_factory: pytest.TempPathFactory, spec: CheckpointSpec, rank: dict[str, int], path: str
) -> None:
    """Bits, groups, zero points, orders, sizes, names, shards, TP × EP: the oracle's bytes or a refusal."""
    spec = replace(spec, num_experts=rank["ep_size"] + spec.seed % 2, top_k=1)  # one or two a rank
    source = make_source(spec)
    (experts,) = source.layers.values()
    options: dict[str, Any] = {
        "tp": Shard(rank["tp_rank"], rank["tp_size"]),
        "ep": Shard(rank["ep_rank"], rank["ep_size"]),
        "top_k": 1,
    }

    def made() -> MarlinMoELayer:
        if path == "dict":
            return load(source, **options)
        folder = tmp_path_factory.mktemp("checkpoint")
        write_source(folder, source)
        return next(iter(load_layers(folder, **options).values()))

    try:
        expected = expected_layer(experts, **rank)
    except Refused:
        with pytest.raises(ShardError):
            made()
        return
    as_expected(made(), experts, act_order=spec.has_g_idx, expected=expected, **rank)


def test_equal_bytes_sees_every_difference() -> None:
    """The comparison itself can fail: sign of zero, NaN, dtype, shape."""
    equal_bytes(torch.tensor([float("nan")]), torch.tensor([float("nan")]), "NaN")
    for got, expected in (
        (torch.tensor([0.0]), torch.tensor([-0.0])),
        (torch.tensor([1]), torch.tensor([1], dtype=torch.int32)),
        (torch.ones(2), torch.ones(1, 2)),
        (None, torch.ones(1)),
        (torch.ones(1), None),
    ):
        with pytest.raises(AssertionError, match="thing"):
            equal_bytes(got, expected, "thing")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"max_tokens": "8"}, "max_tokens: expected int, got str"),
        ({"top_k": "2"}, "top_k: expected int or None, got str"),
        ({"allow_dead_experts": 1}, "allow_dead_experts: expected bool, got int"),
        ({"device": 1.5}, "device: expected a torch"),
    ],
)
def test_options_of_a_wrong_type(options: dict[str, Any], text: str) -> None:
    with pytest.raises(TypeError, match=text):
        load(make_source(PLAIN), **options)


def test_devices_are_taken_as_they_are_named() -> None:
    source = make_source(PLAIN)
    with pytest.raises(MarlinMoEError, match=r"device: expected a device that there is.*bogus"):
        load(source, device="bogus")
    if torch.cuda.is_available():
        assert load(source, device=0).device == torch.device("cuda:0")
    else:
        with pytest.raises(MarlinMoEError, match=r"device: expected a device that there is \(cpu\), got '0'"):
            load(source, device=0)


def test_what_is_no_layer_and_no_name() -> None:
    source = make_source(PLAIN)
    with pytest.raises(TypeError, match="layer: expected MarlinMoELayer, got NoneType"):
        update_weights_(None, {})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="keys that are str, tensors' names, got int 7"):
        process_weights({7: torch.zeros(1)}, scheme=scheme_of(source))  # type: ignore[dict-item]
