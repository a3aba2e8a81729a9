"""Checkpoint tensors -> one finished layer in this process: `process_weights`, and the same in place."""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from ..kernels.checks import check_type
from ..kernels.device import usable_device
from ..kernels.errors import LayerError
from ..kernels.layer import WHOLE, MarlinMoELayer, Shard
from .assemble import assemble_layer
from .blocks import LayerMemory, run_blocks
from .check import expert_facts
from .errors import ExpertsError, MarlinMoEWarning, SchemeError
from .pipeline import Pipeline
from .scheme import QuantScheme
from .states import Context, ExpertFacts, ExpertTensors, State

LAYER_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def check_dtype(dtype: torch.dtype | None) -> None:
    """Raise unless `dtype` is one that scales and activations may have, or None.

    Raises:
        TypeError: no torch.dtype, such as its name.
        ExpertsError: another one.
    """
    if dtype is None or dtype in LAYER_DTYPES:
        return
    expected = "dtype: expected torch.bfloat16, torch.float16, torch.float32 or None (the source's)"
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{expected}, got {type(dtype).__name__} {dtype!r}.")
    raise ExpertsError(f"{expected}, got {dtype}.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How a layer was made from checkpoint tensors, carried by the layer for `update_weights_`."""

    scheme: QuantScheme
    module: str
    tp: Shard = WHOLE
    ep: Shard = WHOLE
    dtype: torch.dtype | None = None
    top_k: int | None = None
    max_tokens: int = 8192
    allow_dead_experts: bool = False
    pipeline: Pipeline = field(default_factory=Pipeline.default)

    def __post_init__(self) -> None:
        for name, kind in (("tp", Shard), ("ep", Shard), ("pipeline", Pipeline)):
            value = getattr(self, name)
            if not isinstance(value, kind):
                found = f"{type(value).__name__} {value!r}"
                raise TypeError(f"{name}: expected a {kind.__name__}, got {found}.")
        check_type("top_k", self.top_k, int, optional=True)
        check_type("max_tokens", self.max_tokens, int)
        check_type("allow_dead_experts", self.allow_dead_experts, bool)
        check_dtype(self.dtype)

    def run(self, experts: ExpertTensors, device: torch.device) -> MarlinMoELayer:
        """The finished layer of a layer's checkpoint tensors on `device`."""
        if device.type != "meta":
            experts.check_values()
        facts = expert_facts(experts, self.scheme)
        context = self.context(facts, device)
        memory = LayerMemory(device)
        result = run_blocks(self.pipeline, experts, facts, context, memory)
        state = State(experts=range(*self.ep.bounds(facts.num_experts)), facts=result, fields=memory.tensors)
        return assemble_layer(self.pipeline.run_layer(state, context), context, recipe=self)

    def context(self, facts: ExpertFacts, device: torch.device) -> Context:
        """What the stages are told, on `device`; warns where scales will be converted."""
        if self.dtype is not None and self.dtype != facts.scales_dtype:
            warnings.warn(
                f"scales are converted once, from {facts.scales_dtype} to {self.dtype}.",
                MarlinMoEWarning,
                stacklevel=3,
            )
        return Context(
            device=device,
            tp=self.tp,
            ep=self.ep,
            scheme=self.scheme,
            dtype=self.dtype,
            allow_dead_experts=self.allow_dead_experts,
            top_k=self.top_k,
            max_tokens=self.max_tokens,
        )


def process_weights(
    experts: Mapping[str, torch.Tensor] | ExpertTensors,
    *,
    scheme: QuantScheme,
    tp: Shard | None = None,
    ep: Shard | None = None,
    device: torch.device | str | int | None = None,
    dtype: torch.dtype | None = None,
    max_tokens: int = 8192,
    top_k: int | None = None,
    allow_dead_experts: bool = False,
    pipeline: Pipeline | None = None,
) -> MarlinMoELayer:
    """The layer of one MoE layer's checkpoint tensors, for model init.

    Args:
        experts: names below the experts module, as in the checkpoint (`"7.gate_proj.weight_packed"`), to
            tensors; or an `ExpertTensors`. All experts of the layer, also under EP. They stay unchanged.
        scheme: how they are quantized, e.g. `QuantScheme.from_config(quantization_config, module)`.
        tp, ep: this rank's part; the whole by default.
        device: where the layer lies; by default where the tensors are.
        dtype: of scales and bias (bfloat16, float16, float32); None keeps the source's.
        max_tokens: tokens that one pass of the op takes.
        top_k: experts per token, for sizing the workspace; the first call's by default.
        allow_dead_experts: accept a projection whose scales are all zero.
        pipeline: other stages than `Pipeline.default()`.

    Returns:
        A `MarlinMoELayer` with its workspace.

    Raises:
        TypeError: an argument of another Python type.
        MarlinMoEError: there is no such device.
        ExpertsError: tensors that do not fit the scheme or hold values no layer can have; all in one text.
        ShardError: a TP or EP size that does not fit; it names those that do.
    """
    if not isinstance(scheme, QuantScheme):
        raise TypeError(f"scheme: expected a QuantScheme, got {type(scheme).__name__}.")
    if not isinstance(experts, ExpertTensors):
        named = ExpertTensors.from_mapping(experts)
        where = {tensor.device for tensor in experts.values()}
        if device is None and len(where) > 1:
            raise ExpertsError(
                f"experts: expected tensors on one device, got {', '.join(map(str, where))}. Pass device=."
            )
        device = next(iter(where)) if device is None else device
        experts = named
    recipe = Recipe(
        scheme=scheme,
        module=experts.name,
        tp=WHOLE if tp is None else tp,
        ep=WHOLE if ep is None else ep,
        dtype=dtype,
        top_k=top_k,
        max_tokens=max_tokens,
        allow_dead_experts=allow_dead_experts,
        pipeline=Pipeline.default() if pipeline is None else pipeline,
    )
    return recipe.run(experts, usable_device("cpu" if device is None else device))


def update_weights_(
    layer: MarlinMoELayer, experts: Mapping[str, torch.Tensor] | ExpertTensors
) -> MarlinMoELayer:
    """The layer with new weights in its own storage, from checkpoint tensors; every data_ptr() stays.

    The tensors go through the recipe that the layer was made with (scheme, shard, dtype, pipeline). They are
    finished and checked before the first byte of the layer changes.

    Raises:
        TypeError: `layer` is no layer, `experts` no mapping of names to tensors.
        SchemeError: the layer was made by `from_marlin` and has no recipe.
        ExpertsError: as in `process_weights`; the layer is unchanged.
        LayerError: they make a layer of other sizes, dtypes or format; the layer is unchanged.
    """
    recipe = _recipe(layer)
    if not isinstance(experts, ExpertTensors):
        experts = ExpertTensors.from_mapping(experts, module=recipe.module)
    return layer.update_(recipe.run(experts, layer.device))


def check_update(layer: MarlinMoELayer, experts: ExpertTensors) -> None:
    """Raise as `update_weights_` does for names, shapes, dtypes and formats; no weight is read or written.

    So that several layers can be looked at before the first one changes. What is left for `update_weights_`
    to find is values that no layer can have.
    """
    recipe = _recipe(layer)
    if layer.device.type != "meta":
        experts.check_values()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", MarlinMoEWarning)  # said by update_weights_
        problems = layer.update_problems(recipe.run(experts, torch.device("meta")))
    if problems:
        raise LayerError(
            f"{recipe.module}: expected new weights of the layer's sizes, dtypes and format, because they go "
            "into its storage, got others; nothing was written. Load these weights as a model of their own.\n"
            + "\n".join(problems)
        )


def _recipe(layer: MarlinMoELayer) -> Recipe:
    """How the layer was made; SchemeError where nothing says so."""
    check_type("layer", layer, MarlinMoELayer)
    if not isinstance(layer.recipe, Recipe):
        raise SchemeError(
            "layer: expected one made by load_layers or process_weights, whose recipe new weights go "
            "through, got one without a recipe (from_marlin). Make a layer of the new weights and use "
            "layer.update_(other)."
        )
    return layer.recipe
