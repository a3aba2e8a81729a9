"""Names in a packed checkpoint, and how one is recognised."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..checkpoint import CONFIG, INDEX

FORMAT = "marlin_moe"
VERSION = 1
LAYOUT = {"name": "marlin", "version": 1}
MANIFEST = "marlin_moe.json"
SOURCE_CONFIG = "source_config.json"
SOURCE_FILES = "source_files.json"
WORK_FOLDER = ".marlin_moe"
RUN = "run.json"
"""In the work folder: a run that has not finished."""

OWN_FILES = (CONFIG, INDEX, SOURCE_CONFIG, SOURCE_FILES)
RESERVED = (MANIFEST, *OWN_FILES)
MARKER = {"quant_method": FORMAT, "version": VERSION}
"""`quantization_config` of a packed checkpoint."""

QUANTIZATION_KEYS = ("quantization_config", "compression_config")


def layer_files(modules: Sequence[str]) -> dict[str, str]:
    """Module -> `experts-<layer>.safetensors`: the layer's number if it tells them apart, else the index."""
    numbers = [found[-1] if (found := re.findall(r"(?:^|\.)(\d+)(?=\.|$)", m)) else None for m in modules]
    unique = None not in numbers and len(set(numbers)) == len(numbers)
    labels = numbers if unique else [str(i) for i in range(len(modules))]
    return {module: f"experts-{label}.safetensors" for module, label in zip(modules, labels, strict=True)}


def rest_file(index: int) -> str:
    """`rest-xxxxx.safetensors`, counted from 1."""
    return f"rest-{index + 1:05d}.safetensors"


def tensor_name(module: str, field: str) -> str:
    """The packed name of a state's field: `w13_zero_points` -> `<module>.w13.zero_points`."""
    matrix, _, rest = field.partition("_")
    dotted = f"{matrix}.{rest}" if matrix in ("w13", "w2") else field
    return f"{module}.{dotted}" if module else dotted


def quantization_places(config: dict[str, Any]) -> list[tuple[dict[str, Any], str]]:
    """(object, key) of every quantization config in a model config: at the top and in `text_config`."""
    nested = config.get("text_config")
    holders = [config, nested] if isinstance(nested, dict) else [config]
    return [(h, key) for h in holders for key in QUANTIZATION_KEYS if isinstance(h.get(key), dict)]


def packed_config(source_config: bytes) -> bytes:
    """`config.json` of the packed checkpoint: the source's with `MARKER` where quantization_config stood."""
    config = json.loads(source_config)
    for holder, key in quantization_places(config):
        renamed = {QUANTIZATION_KEYS[0] if k == key else k: v for k, v in holder.items()}
        renamed[QUANTIZATION_KEYS[0]] = MARKER
        holder.clear()
        holder.update(renamed)
    text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
    try:
        return text.encode()
    except UnicodeEncodeError:  # half a surrogate pair, which JSON can only spell as an escape
        return (json.dumps(config, indent=2) + "\n").encode()


def marker_of(config: bytes) -> Any:
    """What a packed directory's `config.json` says instead of `MARKER`; `MARKER` itself if that is all."""
    try:
        content = json.loads(config)
    except (ValueError, RecursionError):
        return "no JSON"
    if not isinstance(content, dict):
        return type(content).__name__
    found = [holder[key] for holder, key in quantization_places(content)]
    return next((marker for marker in found if marker != MARKER), MARKER if found else None)


def is_packed(path: str | Path) -> bool:
    """Whether a directory is a packed checkpoint, or what an interrupted run left of one."""
    path = Path(path)
    try:
        if (path / MANIFEST).exists() or (path / WORK_FOLDER / RUN).exists():
            return True
        if not (path / CONFIG).is_file():
            return False  # a pipe would be waited for
        config = json.loads((path / CONFIG).read_bytes())
    except (OSError, ValueError, RecursionError):
        return False  # whoever opens it as a checkpoint says what is wrong
    if not isinstance(config, dict):
        return False
    return any(holder[key].get("quant_method") == FORMAT for holder, key in quantization_places(config))
