"""A checkpoint as transformers runs it with exactly dequantized weights: the reference for `load_model`.

Every quantized linear is unpacked by the oracle and given to transformers as a plain float32 weight, experts
under their numbers; transformers merges and runs them its own way.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from oracle_folder import projection_from, quantization_config, read_tensors

CLASSES = {"kimi_k25": "Kimi_K25ForConditionalGeneration"}
PACKED = (".weight_packed", ".qweight")
COMPANIONS = (
    "weight_scale",
    "weight_zero_point",
    "weight_shape",
    "weight_g_idx",
    "scales",
    "qzeros",
    "g_idx",
)


def dense_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint, quantized linears as float32 `<linear>.weight`."""
    tensors, config = read_tensors(path), quantization_config(path)
    linears = [name.removesuffix(end) for name in tensors for end in PACKED if name.endswith(end)]
    dense = {name: projection_from(tensors, name, config).dense() for name in linears}
    plain = {
        name: tensor
        for name, tensor in tensors.items()
        if not name.endswith(PACKED) and name.rpartition(".")[2] not in COMPANIONS
    }
    return plain | {f"{name}.weight": weight for name, weight in dense.items()}


def exact_model(path: Path, *, tensors: dict[str, torch.Tensor] | None = None) -> Any:
    """The float32 model of a checkpoint directory (or of other dense tensors with its config)."""
    import transformers

    raw = json.loads((path / "config.json").read_text())
    raw.pop("quantization_config", None)
    if "text_config" in raw:
        raw["text_config"].pop("quantization_config", None)
    model_type = raw.pop("model_type")
    config = transformers.AutoConfig.for_model(model_type, **raw)
    model_class = getattr(transformers, CLASSES.get(model_type) or raw["architectures"][0])
    model, found = model_class.from_pretrained(
        None,
        config=config,
        state_dict=dense_tensors(path) if tensors is None else tensors,
        dtype=torch.float32,
        experts_implementation="eager",
        output_loading_info=True,
    )
    assert not found["missing_keys"], found["missing_keys"]
    return model.requires_grad_(requires_grad=False)
