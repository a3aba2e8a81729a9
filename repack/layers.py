"""The quantized MoE layers of an open checkpoint, in order: `MoELayerSource`."""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from .checkpoint import Checkpoint, shorten
from .errors import ExpertsError, SchemeError
from .experts.find import ExpertsModule, find_experts, natural
from .experts.fused import split_key
from .quant_methods.table import METHODS
from .scheme import Linears, QuantScheme
from .states import ExpertTensors

LAYER_NUMBER = re.compile(r"(?:^|\.)(\d+)(?=\.)")
ROUTERS = (
    "gate.weight",
    "router.weight",
    "gate.wg.weight",
    "router.layer.weight",
    "router.classifier.weight",
)
"""Names of a router beside the experts module, as models have them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MoELayerSource:
    """One MoE layer of a checkpoint: its scheme and its tensors, read when asked for."""

    name: str
    scheme: QuantScheme
    experts: ExpertTensors


def moe_layers(checkpoint: Checkpoint, *, only: Iterable[str] | None = None) -> dict[str, MoELayerSource]:
    """Module name -> every MoE layer whose routed experts are WNA16, in natural order.

    Experts stored as plain weights (an MTP layer in bf16) are no WNA16 layer: they are carried over.

    Raises:
        ExpertsError: none is found, or `only` names one that is not there; it lists what was seen.
        SchemeError: packed experts that the config does not name, or that Marlin cannot run.
    """
    every = find_experts(checkpoint.tensors)
    modules = {name: module for name, module in every.items() if module.quantized}
    if not modules:
        raise ExpertsError(
            f"{checkpoint.path}: expected routed experts with packed weights "
            f"(…experts.<n>.gate_proj.weight_packed or alike), got none among {len(checkpoint.tensors)} "
            f"tensors of {shorten(list(checkpoint.files))}. This is no WNA16 MoE checkpoint."
        )
    lost = routers_without_experts(checkpoint.tensors, every)
    if lost:
        raise ExpertsError(
            f"{checkpoint.path}: expected experts beside every router, because other layers have them "
            f"under the same names, got none beside {shorten(lost)}. A shard is missing; fetch it again."
        )
    names = list(modules) if only is None else list(only)
    unknown = [name for name in names if name not in modules]
    if unknown:
        raise ExpertsError(
            f"only: expected names of MoE layers in {checkpoint.path} ({shorten(list(modules))}), got "
            f"{shorten(unknown)}."
        )
    config = checkpoint.quantization_config
    return {name: layer_source(checkpoint, config, modules[name]) for name in modules if name in names}


def routers_without_experts(tensors: Iterable[str], modules: Iterable[str]) -> list[str]:
    """Routers of layers that have no experts module where layers with the same names have one.

    A router is what models call the weight that scores experts, beside the experts or one level above:
    `model.layers.3.mlp.gate.weight` for `model.layers.3.mlp.experts`.
    """
    present = list(tensors)
    names = set(present)
    seen: set[str] = set()
    lost: set[str] = set()
    for module in modules:
        found = LAYER_NUMBER.search(module)
        if found is None or (alike := f"{module[: found.start(1)]}#{module[found.end(1) :]}") in seen:
            continue
        seen.add(alike)  # layers with the same names but for their number are looked at together
        block = module.rpartition(".")[0]
        for router in (f"{block}.{router}" for router in ROUTERS):
            if router in names:
                lost |= set(_alone(router, module, found, present))
    return sorted(lost, key=natural)


def _alone(router: str, module: str, number: re.Match[str], present: list[str]) -> Iterator[str]:
    """Routers as `router` in other layers, where no tensor lies below the module as `module` there."""
    start, stop = number.span(1)
    for name in present:
        other = name[start : len(name) - (len(router) - stop)]
        if other.isdigit() and name == f"{router[:start]}{other}{router[stop:]}":
            experts = f"{module[:start]}{other}{module[stop:]}."
            if not any(tensor.startswith(experts) for tensor in present):
                yield name


def layer_source(checkpoint: Checkpoint, config: Mapping[str, Any], module: ExpertsModule) -> MoELayerSource:
    """One MoE layer of a checkpoint whose quantization config is `config`; raises as `moe_layers` does."""
    _refuse_interleaved(checkpoint, module)
    count, named = len(module.experts), checkpoint.num_experts
    if named and count not in named and module.experts[-1] == count - 1:  # gaps are named by `check`
        raise ExpertsError(
            f"{module.name}: expected {' or '.join(map(str, sorted(named)))} experts, which config.json says "
            f"(num_experts or alike), got {count}. A shard is missing, or the config is of another "
            f"one.{module.fewer_tensors}"
        )
    if checkpoint.top_k is not None and checkpoint.top_k > module.experts[-1] + 1:
        raise ExpertsError(
            f"{module.name}: expected at most {count} experts per token, because the layer has no more, got "
            f"{checkpoint.top_k} in config.json (num_experts_per_tok or alike). Correct the config."
        )
    scheme = next(
        (s for names in linears(module) if (s := QuantScheme.find(config, module.name, linears=names))), None
    )
    if scheme is None:
        packed = METHODS[config.get("quant_method", "compressed-tensors")].packed_field
        raise SchemeError(
            f"{module.name}: expected quantization_config to target its experts, because they have {packed}, "
            "got no group that does, or `ignore` names them. The config is of another checkpoint."
        )
    return MoELayerSource(
        name=module.name, scheme=scheme, experts=ExpertTensors.from_checkpoint(checkpoint, module)
    )


INTERLEAVED = ("gpt_oss",)
"""Model types whose fused gate_up_proj holds gate and up in turns, row by row, not one after the other."""


def _refuse_interleaved(checkpoint: Checkpoint, module: ExpertsModule) -> None:
    """Raise where nothing but the model's type tells that gate and up are not side by side."""
    tensors = module.fused.tensors.values() if module.fused is not None else ()
    joined = [tensor.key for tensor in tensors if tensor.roles == ("gate", "up")]
    model = checkpoint.text_config.get("model_type")
    if joined and model in INTERLEAVED:
        raise ExpertsError(
            f"{module.name}.{joined[0]}: expected gate's rows before up's, got a checkpoint of model_type "
            f"{model}, which interleaves them. Save the experts as numbered ones (experts.0.gate_proj …)."
        )


def linears(module: ExpertsModule) -> Iterator[Linears]:
    """Role -> the full names of the module's linears; fused experts first under their own names.

    The configs of fused experts were written when they were linears of their own, or for the fused ones.
    """
    if module.fused is not None:
        fused = {
            role: tuple(
                f"{module.name}.{parts[0]}"
                for key, tensor in module.fused.tensors.items()
                if role in tensor.roles and tensor.field == "weight_packed" and (parts := split_key(key))
            )
            for role in ("gate", "up", "down")
        }
        yield fused
    roles = zip(("gate", "up", "down"), module.spelling.projections, strict=True)
    yield {
        role: tuple(f"{module.name}.{e}.{projection}" for e in module.experts) for role, projection in roles
    }
