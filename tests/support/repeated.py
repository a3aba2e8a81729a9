"""Large checkpoints in no time: one expert's tensors stand in every expert of every layer."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors.torch import save_file

from checkpoint_spec import CheckpointSpec
from checkpoints import make_source


def write_repeated(path: Path, spec: CheckpointSpec, *, num_experts: int, num_layers: int = 1) -> int:
    """A checkpoint of many experts and layers below a new directory; bytes of one expert."""
    source = make_source(spec)
    (module,) = source.layers
    one = source.expert_tensors(module)
    path.mkdir()
    (path / "config.json").write_text(json.dumps(source.config | {"num_experts": num_experts}))
    tensors = {
        f"{module.replace('.0.', f'.{layer}.', 1)}.{expert}.{key.removeprefix('0.')}": tensor.clone()
        for layer in range(num_layers)
        for expert in range(num_experts)
        for key, tensor in one.items()
    }
    save_file(tensors, path / "model.safetensors")
    return sum(tensor.nbytes for tensor in one.values())
