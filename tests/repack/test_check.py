"""Expert tensors against their scheme: what is refused, in which words, and all of it in one text."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoints import CheckpointSpec, Source, make_source, write_checkpoint
from marlin_moe import ExpertTensors, QuantScheme, load_layers
from marlin_moe.repack.check import expert_facts
from marlin_moe.repack.errors import ExpertsError
from marlin_moe.repack.states import ExpertFacts
from mutations import edit_weights_config, replace_tensor

SPEC = CheckpointSpec(
    num_experts=3, hidden_size=128, intermediate_size=192, group_size=64, symmetric=False, bias=True
)
ORDERED = CheckpointSpec(
    num_experts=3, hidden_size=128, intermediate_size=192, group_size=64, actorder="group", weight_shape=None
)
Tensors = dict[str, torch.Tensor]
MODULE = "model.layers.0.mlp.experts"


def scheme_of(source: Source, **weights: Any) -> QuantScheme:
    config = source.config["quantization_config"]
    config["config_groups"]["group_0"]["weights"].update(weights)
    return QuantScheme.from_config(config, MODULE)


def check(change: Callable[[Tensors], object], spec: CheckpointSpec = SPEC, **weights: Any) -> ExpertFacts:
    """The facts after `change` edited the tensors in place; `weights` edits the config."""
    source = make_source(spec)
    tensors = source.expert_tensors(MODULE)
    change(tensors)
    return expert_facts(ExpertTensors.from_mapping(tensors, module=MODULE), scheme_of(source, **weights))


def edited(key: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({key: change(tensors[key])})


def dropped(*keys: str) -> Callable[[Tensors], object]:
    return lambda tensors: [tensors.pop(key) for key in keys]


def refused(change: Callable[[Tensors], object], spec: CheckpointSpec = SPEC, **weights: Any) -> list[str]:
    """The lines of the error."""
    with pytest.raises(ExpertsError) as caught:
        check(change, spec, **weights)
    return str(caught.value).splitlines()


def test_facts() -> None:
    facts = check(lambda _: None)
    assert (facts.module, facts.num_experts) == (MODULE, 3)
    assert (facts.hidden_size, facts.intermediate_size, facts.padded_intermediate_size) == (128, 192, 192)
    assert (facts.w13.bits, facts.w13.group_size, facts.w13.symmetric) == (4, 64, False)
    assert facts.scales_dtype == torch.bfloat16
    assert facts.biased
    facts = check(lambda _: None, ORDERED)
    assert (facts.w13.act_order, facts.w2.act_order, facts.biased) == (True, True, False)


@pytest.mark.parametrize(
    ("key", "change", "expected", "found"),
    [
        ("1.gate_proj.weight_packed", lambda t: t[:, :-1], "(192, 16)", "(192, 15)"),
        ("1.gate_proj.weight_packed", lambda t: t[:-1], "(192, 16)", "(191, 16)"),
        ("2.down_proj.weight_packed", lambda t: t.T, "(128, 24)", "(24, 128)"),
        ("0.up_proj.weight_scale", lambda t: t[:, :1], "(192, 2)", "(192, 1)"),
        ("0.up_proj.weight_scale", lambda t: t.flatten(), "(192, 2)", "(384,)"),
        ("2.down_proj.weight_scale", lambda t: t.repeat(1, 2), "(128, 3)", "(128, 6)"),
        ("1.down_proj.weight_zero_point", lambda t: t[:-1], "(16, 3)", "(15, 3)"),
        ("1.down_proj.bias", lambda t: t[:-1], "(128,)", "(127,)"),
        ("1.up_proj.weight_shape", lambda t: t[:1], "(2,)", "(1,)"),
        ("1.up_proj.weight_packed", lambda t: t.long(), "I32", "I64"),
        ("1.up_proj.weight_packed", lambda t: t.view(torch.float32), "I32", "F32"),
        ("1.up_proj.weight_scale", lambda t: t.double(), "BF16 or F16 or F32", "F64"),
        ("1.up_proj.weight_zero_point", lambda t: t.to(torch.int8), "I32", "I8"),
        ("1.up_proj.bias", lambda t: t.int(), "BF16 or F16 or F32", "I32"),
        ("1.up_proj.weight_shape", lambda t: t.short(), "I64 or I32", "I16"),
        ("1.up_proj.weight_shape", lambda t: t.flip(0), "[192, 128]", "[128, 192]"),
        ("2.down_proj.weight_shape", lambda t: t + 8, "[128, 192]", "[136, 200]"),
    ],
)
def test_one_wrong_tensor(
    key: str, change: Callable[[torch.Tensor], torch.Tensor], expected: str, found: str
) -> None:
    (line,) = refused(edited(key, change))
    assert line.startswith(f"{MODULE}.{key}: expected {expected}"), line
    assert f"got {found}" in line, line


def test_a_wrong_shape_says_why_it_was_expected() -> None:
    (line,) = refused(edited("0.up_proj.weight_scale", lambda t: t[:, :1]))
    assert "because N=192, K=128 and the weights are int4, group_size 64, asymmetric" in line
    assert "quantization_config.config_groups.group_0" in line


@pytest.mark.parametrize(
    ("weights", "keys"),
    [
        ({"group_size": 128}, ["weight_scale", "weight_zero_point"]),
        ({"group_size": 32}, ["weight_scale", "weight_zero_point"]),
        ({"strategy": "channel", "group_size": None}, ["weight_scale", "weight_zero_point"]),
        ({"num_bits": 8}, ["weight_packed", "weight_zero_point"]),
        ({"symmetric": True}, ["weight_zero_point"]),
    ],
)
def test_the_config_says_otherwise(weights: dict[str, Any], keys: list[str]) -> None:
    text = "\n".join(refused(lambda _: None, **weights))
    for key in keys:
        assert key in text, text
    assert "disagree" in text


def test_a_symmetric_checkpoint_with_an_asymmetric_config() -> None:
    (line,) = refused(lambda _: None, CheckpointSpec(num_experts=2), symmetric=False)
    assert line.startswith(f"{MODULE}: expected 6 tensors more")
    assert "0.gate_proj.weight_zero_point" in line


def test_all_experts_that_are_wrong_are_named() -> None:
    def change(tensors: Tensors) -> None:
        for expert in (0, 2):
            tensors[f"{expert}.up_proj.weight_scale"] = tensors[f"{expert}.up_proj.weight_scale"][:, :1]

    (line,) = refused(change)
    assert line.startswith(f"{MODULE}.0.up_proj.weight_scale")
    assert line.endswith("Wrong too: 2.up_proj.weight_scale.")


@pytest.mark.parametrize(
    "key",
    ["0.up_proj.weight_packed", "0.down_proj.weight_packed", "2.up_proj.weight_zero_point"],
)
def test_missing(key: str) -> None:
    (line,) = refused(dropped(key))
    assert line.startswith(MODULE), line
    assert re.search(rf"{key}\b.*Pass the tensors of all experts of the layer\.", line), line


@pytest.mark.parametrize("shape", [(0, 16), (192, 0), (192,), (3, 192, 16)])
@pytest.mark.parametrize("expert", [0, 2])
def test_packed_words_of_no_size(expert: int, shape: tuple[int, ...]) -> None:
    key = f"{expert}.up_proj.weight_packed"
    (line,) = refused(edited(key, lambda t: torch.zeros(shape, dtype=torch.int32)))
    assert line.startswith(f"{MODULE}.{key}: expected "), line
    assert f"got {shape}." in line, line


def test_no_expert_tells_the_sizes() -> None:
    keys = [f"{e}.{p}.weight_packed" for e in range(3) for p in ("gate_proj", "up_proj", "down_proj")]
    text = "\n".join(refused(dropped(*keys)))
    assert re.search(rf"{MODULE}\.0\.(gate|up)_proj\.weight_packed: expected .*got nothing", text), text


@pytest.mark.parametrize(
    "key",
    ["1.gate_proj.weight", "3rd.weight", "1.gate_proj.input_scale", "1.other_proj.weight_packed", "gate.w"],
)
def test_left_over(key: str) -> None:
    (line,) = refused(lambda tensors: tensors.update({key: torch.zeros(2)}))
    assert line.startswith(f"{MODULE}: expected only the tensors of int4")
    assert f"got 1 that nothing uses: {key}." in line


def test_weight_shape_may_be_absent_or_int32() -> None:
    check(edited("1.up_proj.weight_shape", lambda t: t.int()))
    check(dropped("1.up_proj.weight_shape"))


def assert_two_dtypes(line: str, field: str, *dtypes: str) -> None:
    assert line.startswith(f"{MODULE}: expected {field} of one dtype in all its projections"), line
    found = line.partition(" got ")[2]
    assert all(re.search(rf"\b{dtype}\b", found) for dtype in dtypes), line


@pytest.mark.parametrize("key", ["1.gate_proj.weight_scale", "2.down_proj.weight_scale"])
def test_scales_of_two_dtypes(key: str) -> None:
    (line,) = refused(edited(key, lambda t: t.half()))
    assert_two_dtypes(line, "weight_scale", "BF16", "F16")


def test_biases_of_two_dtypes() -> None:
    """bf16 and fp16 have the same size: read one as the other and the layer is wrong without an error."""
    (line,) = refused(edited("1.up_proj.bias", lambda t: t.half()))
    assert_two_dtypes(line, "bias", "BF16", "F16")


@pytest.mark.parametrize("keys", [["1.up_proj.bias"], [f"{e}.down_proj.bias" for e in range(3)]])
def test_a_bias_on_some_projections(keys: list[str]) -> None:
    (line,) = refused(dropped(*keys))
    assert line.startswith(f"{MODULE}: expected bias on all 9 projections")
    assert f"got it on {9 - len(keys)}" in line


def test_g_idx() -> None:
    key = "1.up_proj.weight_g_idx"
    (line,) = refused(edited(key, lambda t: t[:-1]), ORDERED)
    assert line.startswith(f"{MODULE}.{key}: expected (128,)")
    (line,) = refused(edited(key, lambda t: t.float()), ORDERED)
    assert "expected I32 or I64, got F32" in line
    (line,) = refused(edited(key, lambda t: t.long()), ORDERED)
    assert_two_dtypes(line, "weight_g_idx", "I32", "I64")
    assert key in "\n".join(refused(dropped(key), ORDERED))
    assert "expected 9 tensors more" in "\n".join(refused(lambda _: None, SPEC, actorder="group"))


@pytest.mark.parametrize(
    "key", ["0.gate_proj.weight_g_idx", "1.up_proj.weight_g_idx", "2.down_proj.weight_g_idx"]
)
def test_a_g_idx_on_some_projections_that_need_none(key: str) -> None:
    """`actorder: weight` writes none, older tools a plain one: on all experts of a matrix, or on none."""
    size, count = (192, 3) if "down" in key else (128, 6)
    g_idx = (torch.arange(size) // 64).int()
    (line,) = refused(lambda tensors: tensors.update({key: g_idx}))
    assert line.startswith(f"{MODULE}: expected weight_g_idx on all {count} projections"), line
    assert "or on none, got it on 1" in line, line

    def on_all_of_down(tensors: Tensors) -> None:
        for expert in range(3):
            tensors[f"{expert}.down_proj.weight_g_idx"] = (torch.arange(192) // 64).int()

    check(on_all_of_down)


def test_sizes_that_marlin_has_no_place_for() -> None:
    (line,) = refused(lambda _: None, CheckpointSpec(hidden_size=96, intermediate_size=64))
    assert line.startswith(
        f"{MODULE}: expected a hidden size that is a multiple of 64, Marlin's tile, got 96"
    )
    source = make_source(
        CheckpointSpec(num_experts=1, hidden_size=128, intermediate_size=64, group_size=None)
    )
    tensors = source.expert_tensors(MODULE)
    tensors["0.down_proj.weight_packed"] = torch.zeros(128, 12, dtype=torch.int32)  # I = 96 of groups of 64
    for projection in ("gate_proj", "up_proj"):
        tensors[f"0.{projection}.weight_packed"] = torch.zeros(96, 16, dtype=torch.int32)
    del (
        tensors["0.down_proj.weight_shape"],
        tensors["0.up_proj.weight_shape"],
        tensors["0.gate_proj.weight_shape"],
    )
    tensors |= {
        f"0.{p}.weight_scale": torch.ones(n, 2, dtype=torch.bfloat16)
        for p, n in (("gate_proj", 96), ("up_proj", 96), ("down_proj", 128))
    }
    scheme = scheme_of(source, strategy="group", group_size=64)
    with pytest.raises(
        ExpertsError, match=r"experts\.w2: expected groups x group_size = K, got K=96 and .* 64"
    ):
        expert_facts(ExpertTensors.from_mapping(tensors), scheme)


def test_all_problems_of_a_layer_in_one_report() -> None:
    def change(tensors: Tensors) -> None:
        tensors["0.gate_proj.weight_scale"] = tensors["0.gate_proj.weight_scale"][:, :1]
        tensors["1.up_proj.weight_packed"] = tensors["1.up_proj.weight_packed"].long()
        tensors["2.down_proj.weight_shape"] += 1
        tensors["1.down_proj.weight_scale"] = tensors["1.down_proj.weight_scale"].half()
        tensors["9.left.over"] = tensors.pop("2.down_proj.weight_zero_point")
        del tensors["2.up_proj.bias"], tensors["9.left.over"]
        tensors["2.up_proj.extra"] = torch.zeros(1)

    headline, *lines = refused(change)
    assert headline == f"{MODULE}: 7 problems."
    assert len(lines) == 7
    text = "\n".join(lines)
    for part in (
        "0.gate_proj.weight_scale: expected (192, 2)",
        "1.up_proj.weight_packed: expected I32, got I64",
        "2.down_proj.weight_shape: expected [128, 192]",
        "weight_scale of one dtype",
        "got none of 2.down_proj.weight_zero_point",
        "nothing uses: 2.up_proj.extra",
        "bias on all 9",
    ):
        assert part in text, part


def test_the_same_words_from_a_directory(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, SPEC, shards=2)
    edit_weights_config(tmp_path, group_size=128)
    with pytest.raises(
        ExpertsError, match=rf"{MODULE}\.0\.gate_proj\.weight_scale: expected \(192, 1\).*\(192, 2\)"
    ):
        load_layers(tmp_path)
    edit_weights_config(tmp_path, group_size=64)
    replace_tensor(tmp_path, f"{MODULE}.1.down_proj.weight_packed", lambda t: t[:, 1:])
    with pytest.raises(ExpertsError, match=rf"{MODULE}\.1\.down_proj\.weight_packed: .*got \(128, 23\)"):
        load_layers(tmp_path)
