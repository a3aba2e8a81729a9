"""A checkpoint directory, packed or not, as a model sees it: the model's config, experts, and all the rest.

The rest (embeddings, attention, norms, routers, shared experts, a vision tower) is given as plain tensors
that are read when asked for, under the names of the checkpoint; quantized linears as dequantized weights.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import EllipsisType, TracebackType
from typing import Any

import torch

from ..repack.checkpoint import Checkpoint, read_json
from ..repack.dequantize import dequantized, quantized_linears
from ..repack.experts.find import find_experts
from ..repack.packed.manifest import Manifest
from ..repack.packed.names import QUANTIZATION_KEYS, SOURCE_CONFIG, is_packed


class ModelSource:
    """An open checkpoint directory.

    Attributes:
        path: the directory.
        checkpoint: its config, index and tensors.
        config: `config.json` of the source checkpoint, also where it is packed.
        config_file: where that stands.
        experts: names of the modules whose experts are quantized, as in the checkpoint.

    Raises:
        CheckpointError: as `Checkpoint` does; no quantized experts.
        PackedError: no valid manifest.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        packed = is_packed(self.path)
        manifest = Manifest.read(self.path) if packed else None
        self.checkpoint = Checkpoint(self.path)
        self.config_file = self.path / (SOURCE_CONFIG if packed else "config.json")
        self.config = read_json(self.config_file) if packed else self.checkpoint.config
        if manifest is not None:
            self.experts = tuple(layer.module for layer in manifest.layers)
        else:
            found = find_experts(self.checkpoint.tensors)
            self.experts = tuple(name for name, module in found.items() if module.quantized)

    @property
    def quantization_config(self) -> Mapping[str, Any]:
        """Of the source; an empty one where there is none."""
        nested = self.config.get("text_config")
        holders = [self.config, nested] if isinstance(nested, dict) else [self.config]
        found = [holder[key] for holder in holders for key in QUANTIZATION_KEYS if holder.get(key)]
        return found[0] if found else {}

    def plain_config(self) -> dict[str, Any]:
        """The source's config without its quantization, and without code of its own (`auto_map`)."""
        left_out = {*QUANTIZATION_KEYS, "auto_map"}
        config = {key: value for key, value in self.config.items() if key not in left_out}
        if isinstance(config.get("text_config"), dict):
            text = config["text_config"]
            config["text_config"] = {k: v for k, v in text.items() if k not in left_out}
        return config

    def rest(self, device: torch.device) -> "dict[str, RestTensor]":
        """Name -> tensor of everything that is no quantized expert; linears are dequantized on `device`."""
        modules = tuple(f"{module}." for module in self.experts)
        names = [name for name in self.checkpoint.tensors if not name.startswith(modules)]
        linears = quantized_linears(names)
        taken = {f"{linear}.{field}" for linear, fields in linears.items() for field in fields}
        rest = {
            name: RestTensor(source=self, name=name, fields=(), device=device)
            for name in names
            if name not in taken
        }
        for linear, fields in linears.items():
            name = f"{linear}.weight"
            rest[name] = RestTensor(source=self, name=name, fields=fields, device=device)
        return rest

    def close(self) -> None:
        """Close all files."""
        self.checkpoint.close()

    def __enter__(self) -> "ModelSource":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class RestTensor:
    """A tensor of the rest, read by `tensor[...]` as from a safetensors slice.

    Attributes:
        source: the open directory.
        name: as in the checkpoint; of a quantized linear `<linear>.weight`.
        fields: of a quantized linear; none for what is stored as it is.
        device: where a linear is dequantized.
    """

    source: ModelSource
    name: str
    fields: tuple[str, ...]
    device: torch.device

    def __getitem__(self, index: EllipsisType) -> torch.Tensor:
        """The whole tensor: on the CPU as stored, or float32 on `device`."""
        checkpoint = self.source.checkpoint
        if not self.fields:
            return checkpoint.read(self.name)
        linear = self.name.removesuffix(".weight")
        tensors = {field: checkpoint.read(f"{linear}.{field}").to(self.device) for field in self.fields}
        return dequantized(linear, tensors, self.source.quantization_config)
