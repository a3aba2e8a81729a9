"""A W4A16 or W8A16 MoE checkpoint as a transformers model: `load_model`, and new weights for it.

model = load_model("DST", device="cuda")
model.generate(**tokenizer("…", return_tensors="pt").to("cuda"), max_new_tokens=64)
"""

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..kernels.checks import check_type
from ..kernels.device import usable_device
from ..kernels.layer import MarlinMoELayer
from ..repack.checkpoint import shorten
from ..repack.errors import CheckpointError, MarlinMoEError, MarlinMoEWarning
from ..repack.model_path import model_path
from ..repack.process import check_update, update_weights_
from ..repack.states import ExpertTensors
from .errors import ModelError
from .model_source import ModelSource

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


OWN_OPTIONS = frozenset(
    {"config", "state_dict", "quantization_config", "experts_implementation", "device_map", "torch_dtype"}
    | {"generation_config", "output_loading_info", "tp_plan", "tp_size", "distributed_config", "gguf_file"}
)
"""Arguments of from_pretrained that `load_model` sets itself, or that ask for another way of loading."""


def load_model(
    path: str | Path,
    *,
    device: torch.device | str | int = "cpu",
    dtype: torch.dtype | None = None,
    max_tokens: int = 8192,
    **options: Any,
) -> "PreTrainedModel":
    """The transformers model of a checkpoint, whose routed experts run through the op; for inference.

    The model is built without memory for its experts, which `load_layers` puts in their place. Everything
    else is loaded by transformers under its own names; where it is quantized, as its dequantized weights.

    Args:
        path: a directory, packed or not, or the name of a model on the Hugging Face Hub.
        device: where the model lies: one device.
        dtype: of activations and plain weights; by default the config's.
        max_tokens: tokens that one pass of the op takes; more run in chunks.
        options: for `from_pretrained`, such as `attn_implementation="sdpa"`.

    Returns:
        The model in eval mode, without gradients. It cannot be saved, moved or converted.

    Raises:
        TypeError: an option that load_model sets itself, such as `device_map`.
        ModelError: transformers is missing or does not know the model; weights that the checkpoint lacks;
            experts that the op cannot stand for.
        MarlinMoEError: as `load_layers`.
    """
    require_transformers()
    taken = sorted(OWN_OPTIONS & options.keys())
    if taken:
        raise TypeError(
            f"load_model: expected options of from_pretrained that it does not set itself, got {taken[0]}=."
        )
    target = usable_device(device)
    with ModelSource(model_path(path)) as source:
        if not source.experts:
            raise CheckpointError(
                f"{source.path}: expected routed experts with packed weights, got none. This is no WNA16 MoE "
                "checkpoint; transformers loads it itself."
            )
        model_class, config = _model_class(source)
        model_dtype = dtype or _dtype(config)
        model, found = _from_pretrained(model_class, config, source, target, model_dtype, max_tokens, options)
        missing = sorted(found["missing_keys"] | {key for key, *_ in found["mismatched_keys"]})
        if missing:
            raise ModelError(
                f"{source.path}: expected every weight of {type(model).__name__}, got none, or one of "
                f"another shape, for {shorten(missing)}. A shard is missing, or it is another model's config."
            )
        homeless = sorted({*found["unexpected_keys"], *source.experts} - {*expert_layers(model)})
        if homeless:
            warnings.warn(
                f"{source.path}: {type(model).__name__} has no place for {len(homeless)} tensors or modules "
                f"of experts, which are not loaded: {shorten(homeless)}.",
                MarlinMoEWarning,
                stacklevel=2,
            )
        model.config.name_or_path = str(source.path)
    return model.requires_grad_(requires_grad=False)


def update_weights(model: torch.nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
    """New weights for a model's experts, in the storage they have: no address moves, captured graphs follow.

    Args:
        model: of `load_model`, or any that holds its modules.
        tensors: full names as in the checkpoint that the model was loaded from
            (`model.layers.3.mlp.experts.7.gate_proj.weight_packed`) to tensors, quantized as there: all
            experts of the layers named. Other layers stay as they are.

    Raises:
        TypeError: `tensors` is no mapping of names to tensors.
        ModelError: no such module in the model; names that lie below none of them.
        ExpertsError, LayerError: as `update_weights_`. Names, shapes, dtypes and formats of all layers are
            checked before the first one changes, values of a layer (scales that are not finite) before that
            layer does; a note says which layers were updated before.
    """
    check_type("model", model, torch.nn.Module)
    if not isinstance(tensors, Mapping):
        raise TypeError(f"tensors: expected a mapping of names to tensors, got {type(tensors).__name__}.")
    layers = expert_layers(model)
    if not layers:
        raise ModelError(
            f"model: expected one of load_model, whose experts can be updated, got {type(model).__name__} "
            "without any."
        )
    of_module: dict[str, dict[str, torch.Tensor]] = {}
    strange = []
    for name, tensor in tensors.items():
        if not isinstance(name, str):
            raise TypeError(f"tensors: expected keys that are str, got {type(name).__name__} {name!r}.")
        module = next((module for module in layers if name.startswith(f"{module}.")), None)
        if module is None:
            strange.append(name)
        else:
            of_module.setdefault(module, {})[name.removeprefix(f"{module}.")] = tensor
    if strange:
        raise ModelError(
            f"tensors: expected names below the model's experts modules ({shorten(list(layers))}), got "
            f"{shorten(strange)}. Other weights are parameters of the model: copy_ them into it."
        )
    experts = {
        module: ExpertTensors.from_mapping(below, module=module) for module, below in of_module.items()
    }
    for module, new in experts.items():
        check_update(layers[module], new)
    done: list[str] = []
    for module, new in experts.items():
        try:
            update_weights_(layers[module], new)
        except MarlinMoEError as error:
            if done:
                error.add_note(f"These layers were updated before: {shorten(done)}.")
            raise
        done.append(module)


def expert_layers(model: torch.nn.Module) -> dict[str, MarlinMoELayer]:
    """Experts module as in the checkpoint -> the layer that a model of `load_model` runs for it."""
    from .hf_experts import MarlinExperts

    return {m.layer.recipe.module: m.layer for m in model.modules() if isinstance(m, MarlinExperts)}


def require_transformers() -> None:
    """Raise ModelError, which says how to install it, where transformers cannot be imported."""
    try:
        import transformers  # noqa: F401
    except ImportError as error:
        raise ModelError(
            f"transformers: expected it to be installed, because it builds the model, got: {error}. "
            "pip install 'marlin-moe[transformers]'."
        ) from error


def _model_class(source: ModelSource) -> "tuple[type[PreTrainedModel], PretrainedConfig]":
    """(model class, config): the class that config.json names, else the one transformers has for its type."""
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    )

    raw = source.plain_config()
    name = next(iter(raw.get("architectures") or ()), None)
    kind = raw.get("model_type")
    named = getattr(transformers, str(name), None)
    if kind in CONFIG_MAPPING:
        config = CONFIG_MAPPING[kind].from_dict(raw)
    elif named is not None:  # kimi_k2 is DeepSeek-V3 under another name
        config = named.config_class.from_dict({k: v for k, v in raw.items() if k != "model_type"})
    else:
        raise ModelError(
            f"{source.path / 'config.json'}: expected a model of transformers {transformers.__version__}, "
            f"got model_type {kind!r} of {name}. Models that bring their own code are not loaded."
        )
    for mapping in (MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING):
        if named is None and type(config) in mapping:
            named = mapping[type(config)]
    if named is None:
        raise ModelError(
            f"{source.path / 'config.json'}: expected a model that generates text, got {name} ({kind})."
        )
    return named, config


def _dtype(config: "PretrainedConfig") -> torch.dtype:
    """The config's dtype, or that of its language model; bfloat16 where it has none."""
    found = config.dtype or config.get_text_config().dtype
    return found if isinstance(found, torch.dtype) else torch.bfloat16


def _from_pretrained(
    model_class: "type[PreTrainedModel]",
    config: "PretrainedConfig",
    source: ModelSource,
    device: torch.device,
    dtype: torch.dtype,
    max_tokens: int,
    options: Mapping[str, Any],
) -> "tuple[PreTrainedModel, dict[str, Any]]":
    from transformers import GenerationConfig

    from .hf_experts import IMPLEMENTATION
    from .hf_quantizer import MarlinMoEConfig

    layer_options = {
        "path": source.path,
        "device": device,
        "dtype": None if dtype is torch.float32 else dtype,  # the reference takes scales of any dtype
        "max_tokens": max_tokens,
    }
    generation = None
    if (source.path / "generation_config.json").is_file():
        generation = GenerationConfig.from_pretrained(source.path)
    model, found = model_class.from_pretrained(
        None,
        config=config,
        state_dict=source.rest(device),
        quantization_config=MarlinMoEConfig(experts=source.experts, options=layer_options),
        experts_implementation=IMPLEMENTATION,
        dtype=dtype,
        generation_config=generation,
        output_loading_info=True,
        **options,
    )
    return model, found
