"""What a damaged checkpoint says to a slow, careful reader: experts by their tensors' names.

The reader takes formats from the spec that the checkpoint was made of, not from the (perhaps edited) config,
which is refused or makes no difference. Only GPTQ's `checkpoint_format` decides values that no tensor shows.
"""

from __future__ import annotations

import json
import re

import torch

from checkpoint_spec import NAMINGS, CheckpointSpec
from mutants import CONFIG, INDEX, Files
from oracle_formats import unpack_awq, unpack_ct, unpack_ct_zero_points, unpack_gptq, unpack_gptq_zero_points
from oracle_layer import Projection
from safetensors_bytes import parse

PACKED = re.compile(r"(?P<module>.+experts)\.(\d+\.\w+\.(weight_packed|qweight)|\w+[._](weight_)?packed)")


def read_tensors(files: Files) -> dict[str, torch.Tensor]:
    """The tensors of the files that the index names, or of the one there is; of known dtypes."""
    if INDEX in files:
        names = sorted(set(json.loads(files[INDEX])["weight_map"].values()))
    elif "model.safetensors" in files:
        names = ["model.safetensors"]
    else:
        names = [name for name in files if name.endswith(".safetensors")]
    found = {}
    for tensor in [tensor for name in names for tensor in parse(files[name])]:
        if PACKED.fullmatch(tensor.name) or ".experts." in tensor.name:
            assert tensor.name not in found, tensor.name
            found[tensor.name] = tensor.tensor()
    return found


def packed_modules(tensors: dict[str, torch.Tensor]) -> set[str]:
    """Every experts module that has packed words."""
    return {match["module"] for name in tensors if (match := PACKED.fullmatch(name))}


def dense(
    tensors: dict[str, torch.Tensor], module: str, spec: CheckpointSpec, files: Files
) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 (w13 [E, 2I, H], w2 [E, H, I]) of a module; KeyError and alike where it cannot be read."""
    if spec.storage in ("fused", "fused-nested"):
        return _dense_fused(tensors, module, spec)
    below = {int(rest.split(".")[0]) for name in tensors if (rest := name.removeprefix(module + ".")) != name}
    spellings = next(
        names
        for _, names in NAMINGS.values()
        if all(any(name.startswith(f"{module}.0.{spelling}.") for name in tensors) for spelling in names)
    )
    both, down = [], []
    for expert in range(max(below) + 1):
        gate, up, last = (
            _projection(tensors, f"{module}.{expert}.{spelling}", form, spec, files).dense()
            for spelling, form in zip(spellings, (spec.gate_up, spec.gate_up, spec.down), strict=True)
        )
        both.append(torch.cat([gate, up]))
        down.append(last)
    return torch.stack(both), torch.stack(down)


def _projection(
    tensors: dict[str, torch.Tensor],
    name: str,
    form: tuple[int, int | None],
    spec: CheckpointSpec,
    files: Files,
) -> Projection:
    bits = form[0]
    if spec.storage == "compressed-tensors":
        zeros = tensors.get(f"{name}.weight_zero_point")
        assert (zeros is None) == spec.symmetric, name
        return Projection(
            values=unpack_ct(tensors[f"{name}.weight_packed"], bits),
            scales=tensors[f"{name}.weight_scale"],
            bits=bits,
            zero_points=None if zeros is None else unpack_ct_zero_points(zeros, bits),
            g_idx=tensors.get(f"{name}.weight_g_idx"),
        )
    qweight, qzeros = tensors[f"{name}.qweight"], tensors.get(f"{name}.qzeros")
    scales = tensors[f"{name}.scales"].T.contiguous()
    if spec.storage == "awq":
        assert qzeros is not None, name
        values, zeros = unpack_awq(qweight, bits), unpack_awq(qzeros, bits)
        return Projection(values=values, scales=scales, bits=bits, zero_points=zeros)
    minus_one = json.loads(files[CONFIG])["quantization_config"].get("checkpoint_format") != "gptq_v2"
    assert spec.symmetric or qzeros is not None, name
    return Projection(
        values=unpack_gptq(qweight, bits),
        scales=scales,
        bits=bits,
        zero_points=None if qzeros is None else unpack_gptq_zero_points(qzeros, bits, minus_one=minus_one),
        g_idx=tensors.get(f"{name}.g_idx"),
    )


def _dense_fused(
    tensors: dict[str, torch.Tensor], module: str, spec: CheckpointSpec
) -> tuple[torch.Tensor, torch.Tensor]:
    found = []
    for projection, (bits, _) in (("gate_up_proj", spec.gate_up), ("down_proj", spec.down)):
        parts = {}
        for part in ("packed", "scale", "zero_point"):
            for key in (f"{module}.{projection}_{part}", f"{module}.{projection}.weight_{part}"):
                if key in tensors:
                    parts[part] = tensors[key]
        assert ("zero_point" not in parts) == spec.symmetric, module
        experts = [
            Projection(
                values=unpack_ct(parts["packed"][e], bits),
                scales=parts["scale"][e],
                bits=bits,
                zero_points=None if spec.symmetric else unpack_ct_zero_points(parts["zero_point"][e], bits),
            ).dense()
            for e in range(len(parts["packed"]))
        ]
        found.append(torch.stack(experts))
    return found[0], found[1]
