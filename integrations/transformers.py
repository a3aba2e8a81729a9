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
from ..repack.process import check_dtype, check_update, update_weights_
from ..repack.states import ExpertTensors
from .errors import ModelError
from .model_class import generation_config, model_class, model_dtype, one_line
from .model_source import ModelSource

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


OPTIONS = ("attn_implementation", "use_kernels", "kernel_config", "allow_all_kernels")
"""Arguments of from_pretrained that mean the same here."""

INSTEAD = {
    "revision": "Write path as org/model@revision.",
    "subfolder": "Write the folder into path.",
    "device_map": "Pass device=.",
    "max_memory": "Pass device=: the model lies on one device.",
    "torch_dtype": "Pass dtype=.",
    "config": "Change config.json in a copy of the directory.",
    "generation_config": "Set model.generation_config, or pass it to generate().",
    "cache_dir": "Set HF_HUB_CACHE.",
    "token": "Set HF_TOKEN.",
    "local_files_only": "Set HF_HUB_OFFLINE=1.",
    "trust_remote_code": "Models that bring their own code are not loaded.",
}
"""What to do for an argument of from_pretrained that would have no effect here."""


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
        options: of `from_pretrained`, those that mean the same here: `attn_implementation="sdpa"`,
            `use_kernels`, `kernel_config`, `allow_all_kernels`.

    Returns:
        The model in eval mode, without gradients. `save_pretrained` and `state_dict` are refused; deepcopy,
        pickle and `torch.save` of the whole model take the experts along, `model.to(device)` moves them.
        Another dtype is a matter of `dtype=`: on CUDA `model.to(dtype)` is refused.

    Raises:
        TypeError: an argument of another Python type; an option that would have no effect, such as
            `device_map` or `revision`: it says what to do instead.
        ModelError: transformers is missing or does not know the model, or does not take its config; weights
            that the checkpoint lacks, or that have other shapes than the config says; experts that the op
            cannot stand for.
        MarlinMoEError: as `load_layers`.
    """
    require_transformers()
    strange = [name for name in options if name not in OPTIONS]
    if strange:
        raise TypeError(
            f"load_model: expected options of from_pretrained that have an effect here "
            f"({', '.join(OPTIONS)}), got {strange[0]}=. {INSTEAD.get(strange[0], 'Leave it out.')}"
        )
    check_dtype(dtype)
    target = usable_device(device)
    if target.type == "meta":
        raise ModelError(
            "device: expected one that holds values, because the model is to run, got meta. For shapes alone "
            "load it onto the CPU and move it: model.to('meta')."
        )
    with ModelSource(model_path(path)) as source:
        if not source.experts:
            raise CheckpointError(
                f"{source.path}: expected routed experts with packed weights, got none. This is no WNA16 MoE "
                "checkpoint; transformers loads it itself."
            )
        cls, config = model_class(source)
        model, found = _from_pretrained(
            cls,
            config,
            source,
            device=target,
            dtype=dtype or model_dtype(source, config),
            max_tokens=max_tokens,
            options=options,
        )
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


def _from_pretrained(
    cls: "type[PreTrainedModel]",
    config: "PretrainedConfig",
    source: ModelSource,
    *,
    device: torch.device,
    dtype: torch.dtype,
    max_tokens: int,
    options: Mapping[str, Any],
) -> "tuple[PreTrainedModel, dict[str, Any]]":
    """(model, what from_pretrained says of its keys); ModelError where the class cannot be built."""
    from .hf_experts import IMPLEMENTATION
    from .hf_quantizer import MarlinMoEConfig

    quantization = MarlinMoEConfig(
        experts=source.experts,
        options={
            "path": source.path,
            "device": device,
            "dtype": None if dtype is torch.float32 else dtype,  # the reference takes scales of any dtype
            "max_tokens": max_tokens,
        },
    )
    generation = generation_config(source)
    try:
        model, found = cls.from_pretrained(
            None,
            config=config,
            state_dict=source.rest(device),
            quantization_config=quantization,
            experts_implementation=IMPLEMENTATION,
            dtype=dtype,
            generation_config=generation,
            output_loading_info=True,
            **options,
        )
    except Exception as error:
        if quantization.built or isinstance(error, MarlinMoEError):
            raise
        asked = "".join(f", {name}={value!r}" for name, value in options.items())
        raise ModelError(
            f"{source.config_file}: expected a config that transformers builds a {cls.__name__} of{asked}, "
            f"got an error from it: {one_line(error)} Mend the file or fetch it again"
            f"{', or leave the option out' if asked else ''}."
        ) from error
    return model, found
