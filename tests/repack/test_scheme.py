"""quantization_config -> QuantScheme, matched by compressed-tensors' own rules."""

from __future__ import annotations

import time
from typing import Any

import pytest
from compressed_tensors.quantization import preset_name_to_scheme

from checkpoints import CheckpointSpec
from checkpoints import quantization_config as config_of
from marlin_moe import QuantScheme
from marlin_moe.repack.errors import SchemeError
from marlin_moe.repack.scheme import WeightScheme

MODULE = "model.layers.0.mlp.experts"
WEIGHTS = {"type": "int", "num_bits": 4, "strategy": "group", "group_size": 128, "symmetric": True}
ALL = {"targets": ["Linear"], "weights": WEIGHTS}


def group(*targets: str, **weights: Any) -> dict[str, Any]:
    return {"targets": list(targets), "weights": WEIGHTS | weights}


def config(*groups: Any, **others: Any) -> dict[str, Any]:
    numbered = {f"group_{number}": item for number, item in enumerate(groups)}
    return {"quant_method": "compressed-tensors", "config_groups": numbered} | others


def linears(experts: int = 2, module: str = MODULE) -> dict[str, tuple[str, ...]]:
    return {
        role: tuple(f"{module}.{expert}.{role}_proj" for expert in range(experts))
        for role in ("gate", "up", "down")
    }


def find(given: dict[str, Any], *, experts: int = 2, module: str = MODULE) -> QuantScheme | None:
    return QuantScheme.find(given, module, linears=linears(experts, module))


def facts(scheme: WeightScheme) -> tuple[int, int | None, bool, bool]:
    return scheme.bits, scheme.group_size, scheme.symmetric, scheme.act_order


def both(given: dict[str, Any]) -> tuple[int, int | None, bool, bool]:
    """Facts that w13 and w2 share."""
    scheme = find(given)
    assert scheme is not None
    assert facts(scheme.w13) == facts(scheme.w2)
    return facts(scheme.w13)


def test_the_plain_case() -> None:
    scheme = find(config(ALL))
    assert scheme is not None
    assert both(config(ALL)) == (4, 128, True, False)
    assert scheme.quant_method == "compressed-tensors"
    assert scheme.w13.where == "quantization_config.config_groups.group_0"
    assert str(scheme) == "int4, group_size 128, symmetric"


@pytest.mark.parametrize(
    ("targets", "winner"),
    [
        ((["Linear"], ["re:.*experts.*"]), 1),
        ((["re:.*experts.*"], ["Linear"]), 0),
        ((["re:.*experts.*"], [n for names in linears().values() for n in names]), 1),
        ((["Linear"], [n for names in linears().values() for n in names]), 1),
        ((["re:.*self_attn.*"], ["re:.*mlp.experts.*"]), 1),
        ((["re:.*self_attn.*", "re:.*shared_expert.*"], ["Linear"]), 1),
    ],
)
def test_exact_name_before_pattern_before_class(targets: tuple[list[str], list[str]], winner: int) -> None:
    """Groups are renumbered on save: the attention's may come first, or have other bits."""
    given = config(group(*targets[0], num_bits=8), group(*targets[1], num_bits=4))
    assert both(given)[0] == (8, 4)[winner]


@pytest.mark.parametrize(
    "ignore",
    [
        ["lm_head", "re:.*self_attn.*", "model.layers.0.mlp.gate"],
        ["re:.*layers\\.1\\..*", "model.layers.1.mlp.experts.0.gate_proj"],
        ["model.layers.0.mlp.experts", "Conv2d"],  # names are exact, not prefixes
        ["re:mlp.experts"],  # patterns are matched from the start
        [],
        None,
    ],
)
def test_ignored_others(ignore: list[str] | None) -> None:
    assert both(config(ALL, ignore=ignore)) == (4, 128, True, False)


@pytest.mark.parametrize(
    "ignore",
    [["re:.*experts.*"], ["Linear"], [n for names in linears().values() for n in names], ["re:model.*"]],
)
def test_ignored_experts(ignore: list[str]) -> None:
    given = config(ALL, ignore=ignore)
    assert find(given) is None
    with pytest.raises(SchemeError, match=rf"{MODULE}: expected quantization_config to target its experts"):
        QuantScheme.from_config(given, MODULE, linears=linears())


def test_no_target_matches() -> None:
    assert find(config(group("re:.*self_attn.*"))) is None
    assert find(config(group("MoELinear"))) is None


def test_a_part_ignored_is_refused_by_name() -> None:
    name = f"{MODULE}.1.up_proj"
    with pytest.raises(SchemeError, match=rf"{MODULE}: .*got 1 of 6 projections left out .*{name} first"):
        find(config(ALL, ignore=[name]))
    with pytest.raises(SchemeError, match=r"2 of 6 projections left out"):
        find(config(ALL, ignore=["re:.*down_proj$"]))


def test_gate_unlike_up_is_refused() -> None:
    given = config(group("re:.*(gate|down)_proj$"), group("re:.*up_proj$", num_bits=8))
    with pytest.raises(SchemeError, match=r"0\.up_proj: expected int4.*as .*0\.gate_proj.*got int8.*group_1"):
        find(given)


def test_down_may_differ() -> None:
    gate_up, down = group("re:.*(gate|up)_proj$"), group("re:.*down_proj$", num_bits=8, group_size=32)
    scheme = find(config(gate_up, down))
    assert scheme is not None
    assert (facts(scheme.w13), facts(scheme.w2)) == ((4, 128, True, False), (8, 32, True, False))
    assert str(scheme) == "gate and up int4, group_size 128, symmetric; down int8, group_size 32, symmetric"


@pytest.mark.parametrize("changes", [{"num_bits": 8}, {"group_size": 32}, {"symmetric": False}])
def test_experts_that_differ_are_refused(changes: dict[str, Any]) -> None:
    given = config(group("Linear"), group(r"re:.*experts\.1\..*", **changes))
    with pytest.raises(
        SchemeError, match=r"experts\.1\.gate_proj: expected .* as .*experts\.0\.gate_proj has"
    ):
        find(given)
    same = config(group("Linear"), group(r"re:.*experts\.1\..*"))
    assert find(same) is not None


@pytest.mark.parametrize("preset", ["W4A16", "W4A16_ASYM", "W8A16"])
def test_presets(preset: str) -> None:
    """As compressed-tensors has them; W8A16 had one scale per column once and groups of 128 since."""
    given = {"config_groups": {preset: ["Linear"]}, "ignore": ["lm_head"]}
    weights = preset_name_to_scheme(preset, ["Linear"]).weights
    assert weights is not None
    assert both(given) == (int(preset[1]), weights.group_size, "ASYM" not in preset, False)


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        ({"strategy": "channel", "group_size": None}, (4, None, True, False)),
        ({"strategy": "channel", "group_size": -1}, (4, None, True, False)),
        ({"strategy": None, "group_size": -1}, (4, None, True, False)),
        ({"strategy": None, "group_size": 32}, (4, 32, True, False)),
        ({"group_size": 64, "symmetric": False, "zp_dtype": "torch.int8"}, (4, 64, False, False)),
        ({"num_bits": 8, "observer": "mse", "observer_kwargs": {"grid": 20}}, (8, 128, True, False)),
        ({"actorder": None}, (4, 128, True, False)),
        ({"actorder": False}, (4, 128, True, False)),
        ({"actorder": "weight"}, (4, 128, True, False)),
        ({"actorder": "static"}, (4, 128, True, False)),
        ({"actorder": "group"}, (4, 128, True, True)),
        ({"actorder": "dynamic"}, (4, 128, True, True)),
        ({"actorder": True}, (4, 128, True, True)),
        ({"actorder": "true"}, (4, 128, True, True)),
        ({"actorder": "Group"}, (4, 128, True, True)),
    ],
)
def test_weights(weights: dict[str, Any], expected: tuple[int, int | None, bool, bool]) -> None:
    assert both(config(group("Linear", **weights))) == expected


INT8 = {"type": "int", "num_bits": 8, "strategy": "token", "dynamic": True}


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (config(group("Linear", num_bits=3)), "group_0: expected 4 or 8 bits.*got 3. Requantize"),
        (config(group("Linear", group_size=256)), "group_0: expected group_size 32, 64, 128.*got 256"),
        (config(group("Linear", group_size=16)), "got 16"),
        (
            config(group("Linear", type="float", num_bits=8)),
            r"group_0\.weights: expected static integer.*float",
        ),
        (config(group("Linear", dynamic=True, strategy="token", group_size=None)), "group_0"),
        (
            config(group("Linear", strategy="tensor", group_size=None)),
            "strategy: expected group or channel.*tensor",
        ),
        (config(group("Linear", strategy="block", group_size=None, block_structure=[128, 128])), "got block"),
        (config(group("Linear", actorder="diagonal")), r"actorder: expected group.*got 'diagonal'"),
        (config(ALL | {"input_activations": INT8}), "group_0: expected 16-bit activations"),
        (config(ALL | {"output_activations": INT8}), "group_0: expected 16-bit activations"),
        (config(ALL | {"format": "marlin-24"}), r"group_0\.format: expected pack-quantized.*got marlin-24"),
        (config(ALL, format="nvfp4-pack-quantized"), "format: expected pack-quantized.*got nvfp4"),
        (config(ALL | {"format": "int-quantized"}, format="pack-quantized"), "got int-quantized"),
        (config({"targets": ["Linear"], "weights": None}), r"group_0\.weights: expected how .*got null"),
        (config({"targets": ["Linear"]}), r"group_0\.weights: expected how"),
        (config({"weights": WEIGHTS}), r"group_0\.targets: expected a list of names, got None"),
        (
            config({"targets": "Linear", "weights": WEIGHTS}),
            "group_0.targets: expected a list .*got 'Linear'",
        ),
        (
            config(group("Linear", num_bits="many")),
            "group_0: expected a scheme that compressed-tensors can read",
        ),
        (
            config(group("Linear", unheard_of=1)),
            "group_0: expected a scheme that compressed-tensors can read",
        ),
        (config({"targets": ["Linear"], "weights": 4}), "group_0: expected a scheme"),
        (config(4), r"group_0\.targets: expected a list of names, got 4"),
        ({"config_groups": {"W3A16": ["Linear"]}}, r"W3A16: expected 4 or 8 bits.*got 3"),
        ({"config_groups": {"W99A16": ["Linear"]}}, "W99A16: expected a scheme that compressed"),
        ({"config_groups": {}}, "config_groups: expected an object of groups, got {}"),
        ({"quant_method": "compressed-tensors"}, "config_groups: expected an object of groups, got None"),
        ({"config_groups": [ALL]}, r"config_groups: expected an object of groups, got \["),
        (config(group("re:(")), r"targets: .*re:\("),
        (config(ALL, ignore=["re:["]), r"ignore: .*re:\["),
        (config(ALL, ignore="lm_head"), "ignore: expected a list of names, got 'lm_head'"),
        (config(ALL, ignore=[1]), r"ignore: expected a list of names, got \[1\]"),
        (
            {"quant_method": "bitsandbytes"},
            "quant_method: expected one of .*compressed-tensors.*'bitsandbytes'",
        ),
        ({"quant_method": ["awq"]}, r"quant_method: expected one of .*got \['awq'\]"),
        ({"quant_method": None, "config_groups": {"group_0": ALL}}, "quant_method: .*got None"),
    ],
)
def test_refusals(given: dict[str, Any], text: str) -> None:
    with pytest.raises(SchemeError, match=f"(?s){text}"):
        find(given)


def test_other_groups_may_be_anything() -> None:
    """Only the experts' own group is judged: FP8 attention beside INT4 experts is carried over."""
    fp8 = {"targets": ["re:.*self_attn.*"], "weights": WEIGHTS | {"type": "float", "num_bits": 8}}
    given = config(fp8, ALL | {"format": "pack-quantized"}, format="mixed-precision")
    assert both(given) == (4, 128, True, False)


def test_layers_may_differ() -> None:
    given = config(group(r"re:.*layers\.[01]\..*"), group("Linear", num_bits=8, group_size=32))
    bits = [find(given, module=f"model.layers.{n}.mlp.experts") for n in range(3)]
    assert [scheme and scheme.w13.bits for scheme in bits] == [4, 4, 8]


@pytest.mark.parametrize("naming", ["qwen", "mixtral", "feed_forward", "lfm2"])
def test_without_linears_expert_0_is_asked_under_each_spelling(naming: str) -> None:
    spec = CheckpointSpec(naming=naming, group_size=32, down_bits=8, down_group_size=64, bits=4)
    scheme = QuantScheme.from_config(config_of(spec), spec.module(0))
    assert (facts(scheme.w13), facts(scheme.w2)) == ((4, 32, True, False), (8, 64, True, False))


def test_without_linears_two_answers_are_refused() -> None:
    given = config(group("re:.*_proj$"), group("re:.*w[123]$", num_bits=8))
    with pytest.raises(SchemeError, match=rf"{MODULE}: expected one scheme .*Pass linears="):
        QuantScheme.from_config(given, MODULE)
    assert both(given)[0] == 4


def test_without_linears_a_part_that_no_spelling_completes_is_refused() -> None:
    with pytest.raises(SchemeError, match="1 of 3 projections left out"):
        QuantScheme.from_config(config(group("re:.*(gate|up)_proj$")), MODULE)


def test_the_config_is_not_changed() -> None:
    given = config(group("Linear", actorder="group"), ignore=["lm_head"])
    copy = config(group("Linear", actorder="group"), ignore=["lm_head"])
    find(given)
    assert given == copy


def test_a_large_model_takes_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    """48 layers of 128 experts, 500 ignored names and patterns: 18432 linears. Printed, not judged."""
    ignore = [f"model.layers.{n % 48}.self_attn.{n}_proj" for n in range(440)]
    ignore += [f"re:.*vision_tower.*{n}.*" for n in range(10)] + [f"plain_{n}" for n in range(50)]
    given = config(group("re:.*self_attn.*", num_bits=8), ALL, ignore=ignore)
    find(given)
    started = time.perf_counter()
    for layer in range(48):
        assert find(given, experts=128, module=f"model.layers.{layer}.mlp.experts") is not None
    with capsys.disabled():
        print(f"\n{48 * 128 * 3} linears matched in {time.perf_counter() - started:.1f} s")


@pytest.mark.parametrize("config", [None, "compressed-tensors", 5])
def test_a_config_that_is_no_mapping(config: Any) -> None:
    with pytest.raises(TypeError, match="quantization_config: expected Mapping, got"):
        QuantScheme.from_config(config, "model.layers.0.mlp.experts")
