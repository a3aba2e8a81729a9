"""A quantized linear that is no routed expert -> its weight: what attention and shared experts run with.

Weights of W4A16 and W8A16 come from the same tables that experts are read by (`quant_methods`), so act-order
and zero points are exact too. Other formats of compressed-tensors (FP8 attention beside INT4 experts) go
through compressed-tensors' own decompression, with scales in float32.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from ..kernels.layout import unpack_fields
from .errors import ExpertsError, SchemeError, report
from .quant_methods.compressed_tensors import CompressedTensors, match_groups
from .quant_methods.method import Field
from .quant_methods.table import METHODS
from .scheme import WeightScheme
from .states import dtype_name

QUANTIZED_FIELDS = frozenset(
    {"weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx"}
    | {"weight_global_scale", "input_scale", "input_zero_point", "input_global_scale", "output_scale"}
    | {"qweight", "qzeros", "scales", "g_idx"}
)
"""Last parts of names that stand beside or for a linear's weight where it is quantized."""

MEANT = frozenset({"weight_packed", "weight_scale", "qweight", "scales"})
"""Of these, those without which a linear is not quantized."""

SCALES = frozenset({"weight_scale", "weight_global_scale", "scales"})
"""Of these, what weights are multiplied by, or divided by."""


def quantized_linears(names: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Linear -> its fields, of every quantized linear among tensor names; the bias is left where it is."""
    fields: dict[str, list[str]] = {}
    for name in names:
        module, _, field = name.rpartition(".")
        if field in QUANTIZED_FIELDS or field == "weight":
            fields.setdefault(module, []).append(field)
    return {module: tuple(found) for module, found in fields.items() if MEANT & set(found)}


def dequantized(
    name: str, tensors: Mapping[str, torch.Tensor], quantization_config: Mapping[str, Any]
) -> torch.Tensor:
    """float32 [N, K]: the weight of the linear `name`, exactly (q - zero) * scale, rounded once.

    Args:
        name: the linear's, as in the checkpoint: `model.layers.3.self_attn.q_proj`.
        tensors: field (`weight_packed`) -> tensor, all on one device, where the result lies too.
        quantization_config: as in `config.json`.

    Raises:
        SchemeError: the config does not quantize this linear, or in a way that nothing here can read.
        ExpertsError: a tensor that is missing or does not fit, all problems of the linear in one text; scales
            that are not finite, or all zero.
    """
    kind = str(quantization_config.get("quant_method", "compressed-tensors"))
    method = METHODS.get(kind)
    if method is None:
        raise SchemeError(f"quant_method: expected one of {', '.join(METHODS)}, got {kind!r}.")
    if method.packed_field not in tensors:
        return _decompressed(name, tensors, quantization_config)
    try:
        found = method.find_scheme(quantization_config, name, {"gate": (name,), "down": (name,)})
    except SchemeError:
        if not isinstance(method, CompressedTensors):
            raise
        return _decompressed(name, tensors, quantization_config)
    if found is None:
        raise SchemeError(
            f"{name}: expected quantization_config to target it, because it has {method.packed_field}, got "
            "no group that does, or it is ignored. The config is of another checkpoint."
        )
    scheme = found.w13
    size_n, size_k = method.sizes(tuple(tensors[method.packed_field].shape), bits=scheme.bits)
    if "weight_shape" in tensors:
        size_n, size_k = (int(size) for size in tensors["weight_shape"])
    fields = {field.becomes: field for field in method.fields(scheme, size_n=size_n, size_k=size_k)}
    problems = [text for field in fields.values() if (text := _problem(name, field, tensors.get(field.name)))]
    if problems:
        raise ExpertsError(report(name, problems))
    _check_scales(name, tensors)
    # a zero point of 16, which GPTQ can store, needs more than 4 bits
    bits = scheme.bits if isinstance(method, CompressedTensors) else 8
    canonical = {
        becomes: method.canonical(becomes, tensors[field.name], scheme, bits=bits)
        for becomes, field in fields.items()
        if becomes is not None and field.name in tensors
    }
    return _weight(canonical, scheme, bits=bits, size_n=size_n, size_k=size_k)


def _weight(
    fields: Mapping[str, torch.Tensor], scheme: WeightScheme, *, bits: int, size_n: int, size_k: int
) -> torch.Tensor:
    """float32 [N, K] of fields in the stages' layout."""
    scales = fields["weight_scale"].float()  # [N, G]
    order = fields.get("weight_g_idx") if scheme.act_order else None
    if order is None:
        size = size_k if scheme.group_size is None else scheme.group_size
        order = torch.arange(size_k, device=scales.device) // size
    group_of = order.long()  # [K]
    weight = unpack_fields(fields["weight_packed"], bits=bits)[:, :size_k].float()  # [N, K]
    if scheme.symmetric:
        weight -= 2 ** (scheme.bits - 1)
    else:
        zeros = unpack_fields(fields["weight_zero_point"].t().contiguous(), bits=bits)[:, :size_n]  # [G, N]
        weight -= zeros.t().float()[:, group_of]
    return weight.mul_(scales[:, group_of])


def _problem(name: str, field: Field, tensor: torch.Tensor | None) -> str | None:
    """What is wrong with a field of a linear, or None."""
    expected = f"{name}.{field.name}: expected {' or '.join(map(dtype_name, field.dtypes))} {field.shape}"
    if tensor is None:
        return f"{expected}, got none. A shard is missing; fetch it again." if field.required else None
    if tuple(tensor.shape) == field.shape and tensor.dtype in field.dtypes:
        return None
    found = f"{dtype_name(tensor.dtype)} {tuple(tensor.shape)}"
    return f"{expected}, as quantization_config says, got {found}. The checkpoint and its config disagree."


def _check_scales(name: str, tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise ExpertsError where scales are not finite, or all zero: as of routed experts."""
    for field in sorted(SCALES & tensors.keys()):
        values = tensors[field]
        if not values.is_floating_point():
            continue
        broken = int((~torch.isfinite(values.float())).sum())
        if broken or not values.float().any():
            found = f"{broken} NaN or Inf" if broken else "nothing but zeros"
            raise ExpertsError(
                f"{name}.{field}: expected finite values, not all zero, because weights are multiplied by "
                f"them, got {found} among {values.numel()}. The file is damaged (fetch it again), or was "
                "quantized wrongly (quantize again)."
            )


def _decompressed(name: str, tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any]) -> torch.Tensor:
    """float32 [N, K] by compressed-tensors itself: formats that Marlin does not run."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.compressors.format import infer_module_format
    from compressed_tensors.quantization import QuantizationScheme

    refusal = f"{name}: expected a format that compressed-tensors can decompress, because it is quantized"
    if str(config.get("quant_method", "compressed-tensors")) != "compressed-tensors":
        raise SchemeError(f"{refusal}, got {', '.join(sorted(tensors))} in {config['quant_method']}.")
    group = match_groups(config, name, (name,))[name]
    if group is None:
        raise SchemeError(
            f"{name}: expected quantization_config to target it, because it has "
            f"{', '.join(sorted(tensors))}, got no group that does, or it is ignored. The config is of "
            "another checkpoint."
        )
    _check_scales(name, tensors)
    try:
        scheme = QuantizationScheme.model_validate(config["config_groups"][group])
        form = scheme.format or infer_module_format(torch.nn.Linear, scheme)
        compressor = BaseCompressor.get_value_from_registry(getattr(form, "value", form))
        exact = {
            field: tensor.float() if field == "weight_scale" else tensor for field, tensor in tensors.items()
        }
        weight = compressor.decompress(exact, scheme)["weight"]
    except Exception as error:  # whatever its formats raise for what they do not read
        raise SchemeError(f"{refusal}, got an error from it: {error}") from error
    return torch.as_tensor(weight).float()
