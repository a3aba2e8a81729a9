"""Checkpoints made for a test: random integers, written as the public tools write them.

  checkpoint_spec      CheckpointSpec: everything that decides the bytes; the random integers
  checkpoint_tensors   integers → tensors as stored
  checkpoint_config    config.json
  mutations            small damages to a checkpoint directory
This file: the whole checkpoint, in memory (make_source) or in a directory (write_checkpoint).
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from checkpoint_config import model_config, quantization_config
from checkpoint_spec import CheckpointSpec, random_layers
from checkpoint_tensors import expert_tensors, surrounding_tensors
from oracle_layer import Expert

__all__ = [
    "CheckpointSpec",
    "Source",
    "make_source",
    "quantization_config",
    "tensors_of",
    "write_checkpoint",
    "write_source",
]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Source:
    """What a checkpoint holds: the integers to ask the oracle about, the tensors and the config as stored.

    `layers` has the quantized MoE layers alone, {experts module: experts}. In GPTQ a trivial g_idx is stored
    although the experts here have none.
    """

    spec: CheckpointSpec
    layers: dict[str, list[Expert]]
    tensors: dict[str, torch.Tensor]
    config: dict[str, Any]

    def expert_tensors(self, module: str) -> dict[str, torch.Tensor]:
        """Tensors below `module`, by their names below it ("7.gate_proj.weight_packed")."""
        prefix = module + "."
        return {n.removeprefix(prefix): t for n, t in self.tensors.items() if n.startswith(prefix)}

    @property
    def other_tensors(self) -> dict[str, torch.Tensor]:
        """Tensors of no quantized experts module: what must be carried over unchanged."""
        modules = tuple(module + "." for module in self.layers)
        return {name: tensor for name, tensor in self.tensors.items() if not name.startswith(modules)}


def make_source(spec: CheckpointSpec) -> Source:
    """The checkpoint in memory: the same spec gives the same bytes."""
    layers = random_layers(spec)
    tensors = surrounding_tensors(spec)
    for module, experts in layers.items():
        tensors |= expert_tensors(experts, module, spec)
    own = {
        name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in sorted(tensors.items())
    }
    return Source(spec=spec, layers=layers, tensors=own, config=model_config(spec))


def tensors_of(spec: CheckpointSpec) -> dict[str, torch.Tensor]:
    return make_source(spec).tensors


def write_source(path: Path, source: Source) -> Source:
    """Write config.json, generation_config.json and model.safetensors or index + shards below `path`."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(source.config, indent=2) + "\n")
    (path / "generation_config.json").write_text('{"do_sample": false}\n')
    metadata = {"format": "pt"}
    if source.spec.shards == 1:
        save_file(source.tensors, path / "model.safetensors", metadata=metadata)
        return source
    names = sorted(source.tensors)
    random.Random(source.spec.seed).shuffle(names)
    weight_map: dict[str, str] = {}
    for shard in range(source.spec.shards):
        file = f"model-{shard + 1:05d}-of-{source.spec.shards:05d}.safetensors"
        part = names[shard :: source.spec.shards]
        save_file({name: source.tensors[name] for name in part}, path / file, metadata=metadata)
        weight_map |= dict.fromkeys(part, file)
    total = sum(tensor.nbytes for tensor in source.tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (path / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    return source


def write_checkpoint(path: Path, spec: CheckpointSpec | None = None, **changes: Any) -> Source:
    """Make the checkpoint of `spec` (CheckpointSpec() when None) with `changes`, write it below `path`."""
    return write_source(path, make_source(replace(spec or CheckpointSpec(), **changes)))
