"""How transformers loads a model whose experts are ours: a quantizer, its extension point for such models.

`from_pretrained` builds the model on meta, asks the quantizer to change it, and then fills what is left. Here
every experts module that the checkpoint holds quantized is replaced by a `MarlinExperts`, so that no memory
is ever taken for its weights.
"""

from collections.abc import Mapping
from typing import Any

import torch
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from ..kernels.layer import MarlinMoELayer
from ..repack.checkpoint import shorten
from ..repack.experts.spellings import NUMBERED
from ..repack.load import load_layers
from ..repack.packed.names import MARKER
from .errors import ModelError
from .hf_experts import MarlinExperts, activation_of

METHOD = str(MARKER["quant_method"])
PROBES = ("gate_up_proj", *(f"0.{spelling.gate}.weight" for spelling in NUMBERED))
"""Names below an experts module in a checkpoint, one of which transformers renames to the model's own."""


MOST_SHOWN = 8
"""Weights of wrong shapes that an error lists."""


@register_quantization_config(METHOD)
class MarlinMoEConfig(QuantizationConfigMixin):  # type: ignore[misc]
    """What the quantizer is told: which experts to load, and how `load_layers` is called for them.

    Attributes:
        built: the model stands on meta; from here on errors are not of its config.
        shapes: of every other weight, as the model's config says; empty until the model is built.
    """

    def __init__(
        self, experts: tuple[str, ...] = (), options: Mapping[str, Any] | None = None, **marker: Any
    ) -> None:
        self.quant_method = METHOD
        self.experts = experts
        self.options = dict(options or {})
        self.built = False
        self.shapes: dict[str, tuple[int, ...]] = {}

    def to_dict(self) -> dict[str, Any]:
        """For JSON: the marker of a packed checkpoint."""
        return dict(MARKER)


@register_quantizer(METHOD)
class MarlinMoEQuantizer(HfQuantizer):  # type: ignore[misc]
    """Replaces experts while the model is on meta; refuses to save."""

    def validate_environment(self, *_: Any, **__: Any) -> None:
        """Refuse a packed directory that from_pretrained was given itself: it has no weights for experts."""
        if not self.quantization_config.options:
            raise ModelError(
                "from_pretrained: expected a checkpoint that transformers reads, got a packed one, whose "
                f"experts it cannot (quant_method {METHOD}). Call load_model of marlin_moe's integration."
            )

    def update_device_map(self, device_map: dict[str, Any] | None) -> dict[str, Any] | None:
        """Everything on the layers' device."""
        return {"": self.quantization_config.options["device"]}

    def _process_model_before_weight_loading(self, model: torch.nn.Module, **_: Any) -> None:
        self.quantization_config.built = True
        options = dict(self.quantization_config.options)
        path, device = options.pop("path"), options.pop("device")
        places = experts_places(model, self.quantization_config.experts)
        with torch.device(device):  # the model is being built under torch.device("meta")
            layers = load_layers(path, device, only=list(places), **options)
        for name, place in places.items():
            put_layer(model, place, layers[name])
        self.quantization_config.shapes = shapes_of(model)

    def _process_model_after_weight_loading(self, model: torch.nn.Module, **_: Any) -> None:
        check_shapes(model, self.quantization_config.shapes)
        for module in model.modules():
            if isinstance(module, MarlinExperts):
                module.loaded = True

    def is_serializable(self) -> bool:
        """Never: raise with the reason, where save_pretrained asks."""
        raise ModelError(
            "save_pretrained: expected a model with all its weights, because a saved one would lack its "
            "experts, which are packed in the Marlin layout, got one of load_model. The checkpoint it was "
            "loaded from is the one to keep; `marlin-moe repack` and `marlin-moe unpack` write others."
        )

    @property
    def is_trainable(self) -> bool:
        """The op has no gradient."""
        return False

    @property
    def is_compileable(self) -> bool:
        """The op is registered with torch, so generate() may compile."""
        return True


def experts_places(model: torch.nn.Module, experts: tuple[str, ...]) -> dict[str, str]:
    """Experts module in the checkpoint -> in the model, by transformers' own rules for this model.

    Modules that the model does not have (a next-token layer behind the last one) are left out.

    Raises:
        ModelError: the model has none of them.
    """
    conversions = get_model_conversion_mapping(model)
    renamings = [entry for entry in conversions if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in conversions if isinstance(entry, WeightConverter)]
    state = model.state_dict()
    places = {}
    for module in experts:
        for probe in PROBES:
            key, _ = rename_source_key(
                f"{module}.{probe}", renamings, converters, model.base_model_prefix, state
            )
            if key in state and key.endswith(".gate_up_proj"):
                places[module] = key.rpartition(".")[0]
                break
    if not places:
        own = [name for name in state if name.endswith(".gate_up_proj")]
        raise ModelError(
            f"{type(model).__name__}: expected experts modules where the checkpoint has "
            f"{shorten(list(experts))}, got {shorten(own) or 'none'}. The config is of another checkpoint, "
            "or the model keeps its experts in a way of its own."
        )
    return places


def put_layer(model: torch.nn.Module, place: str, layer: MarlinMoELayer) -> None:
    """Replace the experts module at `place` by the layer; ModelError where sizes or formula differ."""
    experts = model.get_submodule(place)
    activation = activation_of(experts, place)
    count, halves, hidden = experts.get_parameter("gate_up_proj").shape
    wanted = (count, halves // 2, hidden)
    found = (layer.num_global_experts, layer.intermediate_size, layer.hidden_size)
    if wanted != found:
        raise ModelError(
            f"{place}: expected (experts, intermediate size, hidden size) {wanted}, which config.json says, "
            f"got {found} in {layer.recipe.module}. The config is of another checkpoint."
        )
    model.set_submodule(place, MarlinExperts(experts.config, layer, activation))


def shapes_of(model: torch.nn.Module) -> dict[str, tuple[int, ...]]:
    """Weight -> its shape, of everything but the experts that layers hold."""
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def check_shapes(model: torch.nn.Module, expected: Mapping[str, tuple[int, ...]]) -> None:
    """Refuse weights of other shapes than the config's; transformers takes any where a quantizer loads.

    Raises:
        ModelError: weights of another shape, all in one text.
    """
    found = shapes_of(model)
    problems = [
        f"{name}: expected {shape}, which config.json says, got {found[name]}."
        for name, shape in expected.items()
        if name in found and found[name] != shape
    ]
    if problems:
        more = f"\n{len(problems) - MOST_SHOWN} weights more." if len(problems) > MOST_SHOWN else ""
        raise ModelError(
            "\n".join(problems[:MOST_SHOWN])
            + f"{more}\nThe config is of another checkpoint, or the file is altered; fetch both again."
        )
