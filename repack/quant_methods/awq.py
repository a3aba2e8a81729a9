"""AWQ, as AutoAWQ's "gemm" version writes it.

A projection [N, K] has `qweight` int32 [K, N/8], `qzeros` int32 [G, N/8] and `scales` [G, N]. Nibble i of a
word is column 8j + (0, 2, 4, 6, 1, 3, 5, 7)[i], of weights and zero points alike; a stored zero is the zero
itself. `modules_to_not_convert` names parts of module names that stay unquantized. (Facts: AutoAWQ's
`WQLinear_GEMM`.)
"""

from collections.abc import Mapping
from typing import Any

import torch

from ...kernels.layout import pack_fields, unpack_fields
from ..errors import ExpertsError, SchemeError
from ..scheme import Linears, QuantScheme, WeightScheme, combine
from ..states import ExpertTensors
from .gptq import integer
from .method import SCALE_DTYPES, Field, PackedForm

NIBBLE_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)


class AWQ:
    """`QuantMethod` of quant_method "awq"."""

    packed_field = "qweight"

    def find_scheme(self, config: Mapping[str, Any], module: str, linears: Linears) -> QuantScheme | None:
        """One scheme for all linears that no entry of `modules_to_not_convert` names."""
        scheme = _weight_scheme(config)
        excluded = config.get("modules_to_not_convert") or []
        if not isinstance(excluded, list):
            raise SchemeError(
                "quantization_config.modules_to_not_convert: expected a list of parts of names, "
                f"got {excluded!r}."
            )
        found: dict[str, dict[str, WeightScheme | None]] = {}
        for role, names in linears.items():
            for name in names:
                skipped = any(f".{part}." in f".{name}." for part in excluded)
                found.setdefault(role, {})[name] = None if skipped else scheme
        return combine("awq", module, found)

    def sizes(self, packed_shape: tuple[int, ...], *, bits: int) -> tuple[int, int]:
        """(N, K) of [K, N*bits/32]."""
        return packed_shape[1] * 32 // bits, packed_shape[0]

    def fields(self, scheme: WeightScheme, *, size_n: int, size_k: int) -> tuple[Field, ...]:
        """The tensors of one projection."""
        groups = 1 if scheme.group_size is None else -(-size_k // scheme.group_size)
        words_n = -(-size_n * scheme.bits // 32)
        int32 = (torch.int32,)
        return (
            Field(name="qweight", becomes="weight_packed", dtypes=int32, shape=(size_k, words_n)),
            Field(name="scales", becomes="weight_scale", dtypes=SCALE_DTYPES, shape=(groups, size_n)),
            Field(name="qzeros", becomes="weight_zero_point", dtypes=int32, shape=(groups, words_n)),
            Field(name="bias", becomes="weight_bias", dtypes=SCALE_DTYPES, shape=(size_n,), required=False),
        )

    def effective_bits(
        self, experts: ExpertTensors, projections: tuple[str, ...], scheme: WeightScheme
    ) -> int:
        """The scheme's: a stored zero is the zero itself."""
        return scheme.bits

    def canonical(
        self, becomes: str, stacked: torch.Tensor, scheme: WeightScheme, *, bits: int
    ) -> torch.Tensor:
        """Nibbles into column order; weights packed along K, zero points along N."""
        if becomes == "weight_bias":
            return stacked
        if becomes == "weight_scale":
            return stacked.transpose(-1, -2).contiguous()
        columns = in_column_order(stacked, bits=scheme.bits)  # [B, R, K or G, N]
        if becomes == "weight_packed":
            return pack_fields(columns.transpose(-1, -2), bits=bits)
        return pack_fields(columns, bits=bits).transpose(-1, -2).contiguous()

    def stored(self, field: Field, canonical: torch.Tensor | None, form: PackedForm) -> torch.Tensor:
        """Turned and interleaved again."""
        if canonical is None:
            raise ExpertsError(f"{field.name}: expected a tensor that AWQ stores, got metadata.")
        if field.becomes == "weight_bias":
            return canonical
        if field.becomes == "weight_scale":
            return canonical.transpose(-1, -2).contiguous()
        if field.becomes == "weight_packed":
            return interleaved(
                unpack_fields(canonical, bits=form.bits)[..., : form.size_k].transpose(-1, -2), bits=form.bits
            )
        return interleaved(unpack_fields(canonical.transpose(-1, -2), bits=form.bits), bits=form.bits)


def interleaved(fields: torch.Tensor, *, bits: int) -> torch.Tensor:
    """Words [..., N*bits/32] of fields [..., N] in column order: the inverse of `in_column_order`."""
    words = fields.reshape(*fields.shape[:-1], -1, len(NIBBLE_COLUMNS))
    columns = torch.tensor(NIBBLE_COLUMNS, device=fields.device)
    return pack_fields(words.index_select(words.dim() - 1, columns).reshape(fields.shape), bits=bits)


def in_column_order(words: torch.Tensor, *, bits: int) -> torch.Tensor:
    """Fields int32 [..., N] of interleaved words [..., N*bits/32].

    nibble of a word    0 1 2 3 4 5 6 7
    is column           0 2 4 6 1 3 5 7
    """
    fields = unpack_fields(words, bits=bits)  # [..., N]
    words_of = fields.view(*fields.shape[:-1], -1, len(NIBBLE_COLUMNS))  # [..., N/8, 8]
    nibble_of = torch.tensor(NIBBLE_COLUMNS, device=words.device).argsort()
    return words_of.index_select(words_of.dim() - 1, nibble_of).view(fields.shape)


def _weight_scheme(config: Mapping[str, Any]) -> WeightScheme:
    where = "quantization_config"
    settings = {
        **config,
        "bits": config.get("bits", config.get("w_bit")),
        "group_size": config.get("group_size", config.get("q_group_size")),
    }
    version = str(settings.get("version", "gemm")).lower()
    if version != "gemm":
        raise SchemeError(
            f"{where}.version: expected gemm, whose packing is read here, got {version!r}. Save the "
            "checkpoint again in version gemm."
        )
    bits, group_size = integer(settings, "bits", where), integer(settings, "group_size", where)
    if bits != 4:
        raise SchemeError(f"{where}.bits: expected 4, which AWQ packs, got {bits}.")
    if settings.get("zero_point", True) is not True:
        raise SchemeError(
            f"{where}.zero_point: expected true, got {settings['zero_point']!r}. AWQ without zero points has "
            "no public reader to be checked against."
        )
    return WeightScheme(
        bits=bits, group_size=None if group_size == -1 else group_size, symmetric=False, where=where
    )
