"""compressed-tensors, pack-quantized: what llm-compressor writes for W4A16 and W8A16.

A projection [N, K] has `weight_packed` int32 [N, K*bits/32] (q + 2**(bits-1), low bits first along K),
`weight_scale` [N, G], when asymmetric `weight_zero_point` int32 [N*bits/32, G] (packed along N), for grouped
act-order `weight_g_idx` int32 [K], and `weight_shape` [2] as metadata. This is also the layout that the
stages work on, so nothing is converted. (Facts: compressed-tensors 0.20, `compressors/pack_quantized`.)
"""

import re
from collections.abc import Collection, Mapping
from functools import cache
from typing import Any

import torch

from ..errors import SchemeError
from ..scheme import Linears, QuantScheme, WeightScheme, combine
from ..states import ExpertTensors
from .method import SCALE_DTYPES, Field, PackedForm

GROUPED_ACT_ORDER = ("group", "dynamic", "true")
PLAIN_ORDER = ("weight", "static", "none", "false", "")
ONLINE_LOCATIONS = ("input", "output")
"""Where a transform acts on activations while the model runs (compressed-tensors' TransformLocation)."""


class CompressedTensors:
    """`QuantMethod` of quant_method "compressed-tensors"."""

    packed_field = "weight_packed"

    def find_scheme(self, config: Mapping[str, Any], module: str, linears: Linears) -> QuantScheme | None:
        """Matched by compressed-tensors' own rules: exact name, then pattern, then class; `ignore` wins."""
        groups = _groups(config)
        schemes: dict[str, WeightScheme] = {}
        found: dict[str, dict[str, WeightScheme | None]] = {}
        for role, names in linears.items():
            for name, group in match_groups(config, module, names).items():
                if group is not None and group not in schemes:
                    schemes[group] = _weight_scheme(config, group, groups[group])
                found.setdefault(role, {})[name] = None if group is None else schemes[group]
        quantized = [n for schemes in found.values() for n, scheme in schemes.items() if scheme is not None]
        _refuse_online_transforms(config, module, quantized)
        return combine("compressed-tensors", module, found)

    def sizes(self, packed_shape: tuple[int, ...], *, bits: int) -> tuple[int, int]:
        """(N, K) of [N, K*bits/32]."""
        return packed_shape[0], packed_shape[1] * 32 // bits

    def fields(self, scheme: WeightScheme, *, size_n: int, size_k: int) -> tuple[Field, ...]:
        """The tensors of one projection."""
        bits = scheme.bits
        groups = 1 if scheme.group_size is None else -(-size_k // scheme.group_size)
        words_k, words_n = -(-size_k * bits // 32), -(-size_n * bits // 32)
        int32 = (torch.int32,)
        fields = [
            Field(name="weight_packed", becomes="weight_packed", dtypes=int32, shape=(size_n, words_k)),
            Field(name="weight_scale", becomes="weight_scale", dtypes=SCALE_DTYPES, shape=(size_n, groups)),
            Field(
                name="weight_shape",
                becomes=None,
                dtypes=(torch.int64, torch.int32),
                shape=(2,),
                required=False,
            ),
            Field(
                name="weight_g_idx",
                becomes="weight_g_idx",
                dtypes=(torch.int32, torch.int64),
                shape=(size_k,),
                required=scheme.act_order,
            ),
            Field(name="bias", becomes="weight_bias", dtypes=SCALE_DTYPES, shape=(size_n,), required=False),
        ]
        if not scheme.symmetric:
            fields.append(
                Field(
                    name="weight_zero_point",
                    becomes="weight_zero_point",
                    dtypes=int32,
                    shape=(words_n, groups),
                )
            )
        return tuple(fields)

    def effective_bits(
        self, experts: ExpertTensors, projections: tuple[str, ...], scheme: WeightScheme
    ) -> int:
        """The scheme's: zero points are stored as fields of the same bits."""
        return scheme.bits

    def canonical(
        self, becomes: str, stacked: torch.Tensor, scheme: WeightScheme, *, bits: int
    ) -> torch.Tensor:
        """As it is: the stages work on this layout."""
        return stacked

    def stored(self, field: Field, canonical: torch.Tensor | None, form: PackedForm) -> torch.Tensor:
        """As it is; `weight_shape` is (N, K)."""
        return torch.tensor((form.size_n, form.size_k), device="cpu") if canonical is None else canonical


def match_groups(config: Mapping[str, Any], module: str, names: tuple[str, ...]) -> dict[str, str | None]:
    """Linear name -> the config group that quantizes it, or None where none does."""
    from compressed_tensors.utils.match import is_match, match_targets

    linear = _linear()
    exact = set(names)

    def may_match(entry: str) -> bool:
        """False for what matches no linear here: a saved config can list hundreds of other names."""
        return entry.startswith("re:") or entry in exact or is_match("", linear, [entry])

    group_of = {target: name for name, group in _groups(config).items() for target in _targets(name, group)}
    targets = [target for target in group_of if may_match(target)]
    ignore = [entry for entry in _names(config.get("ignore") or [], "ignore") if may_match(entry)]
    matched: dict[str, str | None] = {}
    for name in names:
        hits = match_targets(name, linear, targets)
        ignored = bool(hits) and is_match(name, linear, ignore)
        matched[name] = group_of[hits[0]] if hits and not ignored else None
    return matched


@cache
def _linear() -> torch.nn.Linear:
    """Any linear, for rules that ask for a class; making one takes milliseconds."""
    return torch.nn.Linear(1, 1, device="meta")


def _groups(config: Mapping[str, Any]) -> Mapping[str, Any]:
    groups = config.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise SchemeError(
            f"quantization_config.config_groups: expected an object of groups, got {groups!r}. Only "
            "compressed-tensors configs with config_groups say how weights are quantized."
        )
    return groups


def _targets(name: str, group: Any) -> list[str]:
    """The targets of a group; a preset is a name with its targets."""
    targets = group.get("targets") if isinstance(group, Mapping) else group
    return _names(targets, f"config_groups.{name}.targets")


def _names(value: Any, key: str) -> list[str]:
    """A list of names and patterns ("re:…"), or a SchemeError that quotes what it is instead."""
    if not isinstance(value, list) or not all(isinstance(entry, str) for entry in value):
        raise SchemeError(f"quantization_config.{key}: expected a list of names, got {value!r}.")
    for entry in value:
        try:
            re.compile(entry.removeprefix("re:") if entry.startswith("re:") else "")
        except (re.error, OverflowError, RecursionError) as error:
            raise SchemeError(
                f"quantization_config.{key}: expected regular expressions behind re:, got {entry!r}: {error}."
            ) from error
    return value


def _weight_scheme(config: Mapping[str, Any], name: str, group: Any) -> WeightScheme:
    """The weights of one group, validated by compressed-tensors; `actorder` is judged here.

    compressed-tensors from 0.19 on refuses grouped act-order and takes the string "true" silently, so it is
    taken out before validation.
    """
    from compressed_tensors.quantization import QuantizationScheme, preset_name_to_scheme
    from pydantic import ValidationError

    where = f"quantization_config.config_groups.{name}"
    actorder = None
    try:
        if isinstance(group, Mapping):
            stripped = dict(group)
            if isinstance(group.get("weights"), Mapping):
                stripped["weights"] = {k: v for k, v in group["weights"].items() if k != "actorder"}
                actorder = group["weights"].get("actorder")
            scheme = QuantizationScheme.model_validate(stripped)
        else:
            scheme = preset_name_to_scheme(name, list(group))
    except ValidationError as error:
        found = [f"{'.'.join(map(str, e['loc']))}: {e['msg']}, got {e['input']!r}" for e in error.errors()]
        raise SchemeError(
            f"{where}: expected a scheme that compressed-tensors can read, got {'; '.join(found)}."
        ) from error
    except (KeyError, NotImplementedError, TypeError, ValueError) as error:
        raise SchemeError(
            f"{where}: expected a scheme that compressed-tensors can read, got an error from it: {error}"
        ) from error
    _refuse_other_compression(config)
    weights = scheme.weights
    if weights is None:
        raise SchemeError(f"{where}.weights: expected how the experts' weights are quantized, got null.")
    form = group.get("format") if isinstance(group, Mapping) else None
    form = form or config.get("format") or "pack-quantized"
    if form not in ("pack-quantized", "mixed-precision"):
        raise SchemeError(
            f"{where}.format: expected pack-quantized, the format of W4A16 and W8A16 weights, got {form}. "
            "Marlin cannot run it."
        )
    if scheme.input_activations is not None or scheme.output_activations is not None:
        raise SchemeError(
            f"{where}: expected 16-bit activations (input_activations null), got quantized ones. This op "
            "runs WNA16 only."
        )
    if str(weights.type) not in ("int", "QuantizationType.INT") or weights.dynamic:
        raise SchemeError(
            f"{where}.weights: expected static integer weights, got type {weights.type}, dynamic "
            f"{weights.dynamic}."
        )
    strategy = str(getattr(weights.strategy, "value", weights.strategy))
    if strategy not in ("group", "channel"):
        raise SchemeError(
            f"{where}.weights.strategy: expected group or channel, which Marlin's scales have, got "
            f"{strategy}."
        )
    return WeightScheme(
        bits=weights.num_bits,
        group_size=weights.group_size if strategy == "group" else None,
        symmetric=bool(weights.symmetric),
        act_order=strategy == "group" and _grouped_act_order(actorder, f"{where}.weights.actorder"),
        where=where,
    )


def _refuse_other_compression(config: Mapping[str, Any]) -> None:
    """Raise SchemeError for what changes the meaning of the packed words beside quantization."""
    sparsity = config.get("sparsity_config") or {}
    structure = sparsity.get("format", "dense") if isinstance(sparsity, Mapping) else sparsity
    if structure != "dense":
        raise SchemeError(
            f"quantization_config.sparsity_config: expected none or dense, because packed words hold every "
            f"weight, got {structure!r}. Save the checkpoint without sparse compression."
        )
    if config.get("format") == "marlin-24":
        raise SchemeError(
            "quantization_config.format: expected pack-quantized, got marlin-24, whose weights are 2:4 "
            "sparse and in an order of their own. Save the checkpoint as pack-quantized."
        )


def _refuse_online_transforms(config: Mapping[str, Any], module: str, names: Collection[str]) -> None:
    """Raise SchemeError where a transform of activations has to run with an expert: this op runs none.

    Transforms of weights were applied before they were quantized and ask for nothing.
    """
    transforms = config.get("transform_config") or {}
    groups = transforms.get("config_groups") if isinstance(transforms, Mapping) else None
    for label, group in (groups or {}).items():
        for apply in group.get("apply", ()) if isinstance(group, Mapping) else ():
            location = str(apply.get("location", "")).lower()
            if location not in ONLINE_LOCATIONS:
                continue
            targets = _names(apply.get("targets"), f"transform_config.config_groups.{label}.targets")
            ignore = _names(apply.get("ignore") or [], f"transform_config.config_groups.{label}.ignore")
            hit = next((name for name in names if _is_hit(name, targets, ignore)), None)
            if hit is not None:
                raise SchemeError(
                    f"{module}: expected experts without transforms of their {location}, because the op "
                    f"runs none, got transform_config.config_groups.{label} "
                    f"({group.get('type', 'unnamed')}), which targets {hit}. Fuse the transform into the "
                    "weights when quantizing."
                )


def _is_hit(name: str, targets: list[str], ignore: list[str]) -> bool:
    from compressed_tensors.utils.match import is_match

    return bool(is_match(name, _linear(), targets, ignore))


def _grouped_act_order(actorder: Any, where: str) -> bool:
    """Whether a group's columns lie scattered: `group`, `dynamic` and true say so."""
    text = "none" if actorder is None else str(actorder).lower()
    if text in GROUPED_ACT_ORDER:
        return True
    if text in PLAIN_ORDER:
        return False
    raise SchemeError(f"{where}: expected group, dynamic, true, weight, static or null, got {actorder!r}.")
