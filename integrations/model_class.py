"""A checkpoint's config.json -> the class of transformers that generates its text, with its config."""

from typing import TYPE_CHECKING

import torch

from ..repack.process import LAYER_DTYPES
from .errors import ModelError
from .model_source import ModelSource

if TYPE_CHECKING:
    from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel


def model_class(source: ModelSource) -> "tuple[type[PreTrainedModel], PretrainedConfig]":
    """(class, config): the class that the config names, else the one that transformers has for its type.

    A type that transformers does not know is taken by the class: kimi_k2 is DeepSeek-V3 under another name.

    Raises:
        ModelError: no type of transformers, or one that generates no text; a class of another type; values
            that its config does not take.
    """
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    raw, file = source.plain_config(), source.config_file
    kind, names = raw.get("model_type"), raw.get("architectures") or []
    if not isinstance(kind, str | None) or not isinstance(names, list) or not all(map(_is_name, names)):
        raise ModelError(
            f"{file}: expected model_type to be a string and architectures a list of them, because they name "
            f"the model's class, got {kind!r} and {names!r}. Mend the file or fetch it again."
        )
    name = names[0] if names else None
    family = kind if kind in CONFIG_MAPPING else _family_of(name)
    if family is None:
        raise ModelError(
            f"{file}: expected a model of transformers {transformers.__version__} that generates text, got "
            f"model_type {kind!r} of {name}. Models that bring their own code are not loaded."
        )
    classes = [table[family] for table in _tables() if family in table]
    if not classes:
        raise ModelError(f"{file}: expected a model that generates text, got {name} ({kind}).")
    if name not in classes and hasattr(transformers, str(name)):
        raise ModelError(
            f"{file}: expected architectures to name a class that generates text from a {family} "
            f"({' or '.join(classes)}), got {name}. Mend the file or fetch it again."
        )
    try:
        config = CONFIG_MAPPING[family].from_dict({k: v for k, v in raw.items() if k != "model_type"})
    except Exception as error:  # whatever its checks raise: each config has its own
        raise ModelError(
            f"{file}: expected values that transformers takes for a {family}, got an error from it: "
            f"{one_line(error)} Mend the file or fetch it again."
        ) from error
    return getattr(transformers, str(name if name in classes else classes[0])), config


def model_dtype(source: ModelSource, config: "PretrainedConfig") -> torch.dtype:
    """The config's dtype, or that of its language model; bfloat16 where it has none.

    Raises:
        ModelError: one that the op has not.
    """
    found = config.dtype or config.get_text_config().dtype or torch.bfloat16
    if not isinstance(found, torch.dtype) or found not in LAYER_DTYPES:
        raise ModelError(
            f"{source.config_file}: expected dtype bfloat16, float16 or float32, which activations may have, "
            f"got {found}. Pass dtype=."
        )
    return found


def generation_config(source: ModelSource) -> "GenerationConfig | None":
    """What `generation_config.json` says of generate(), if there is one; ModelError where it is broken."""
    from transformers import GenerationConfig

    file = source.path / "generation_config.json"
    if not file.is_file():
        return None
    try:
        return GenerationConfig.from_pretrained(source.path)
    except Exception as error:  # of reading, of JSON, of its own checks
        raise ModelError(
            f"{file}: expected a generation config of transformers, got an error from it: {one_line(error)} "
            "Mend or remove the file."
        ) from error


def one_line(error: Exception) -> str:
    """The kind and text of another library's error, in one line that ends with a full stop."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}".rstrip(": .") + "."


def _is_name(value: object) -> bool:
    return isinstance(value, str)


def _tables() -> tuple[dict[str, str], dict[str, str]]:
    """model_type -> name of the class that generates text, from images too or from text alone."""
    from transformers.models.auto import modeling_auto

    return (
        modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
        modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    )


def _family_of(name: str | None) -> str | None:
    """The first model_type whose class is called `name`."""
    return next((kind for table in _tables() for kind, cls in table.items() if cls == name), None)
