"""GPTQ, as AutoGPTQ and GPTQModel write it.

A projection [N, K] has `qweight` int32 [K*bits/32, N] (unsigned, low bits first along K), `qzeros` int32
[G, N*bits/32] (low bits first along N), `scales` [G, N], and `g_idx` int32 [K] where desc_act. The first
format stores zero - 1 (a stored 15 of 4 bits is a zero of 16, not 0), `checkpoint_format: gptq_v2` the zero
itself; a config without `checkpoint_format` is of the first. Where `sym` is true every zero is 2**(bits-1).

`dynamic` maps patterns to overrides, first match wins: `-:pattern` leaves a module unquantized, `+:pattern`
or `pattern` changes its bits, group_size, sym or desc_act. (Facts: GPTQModel's quantization config and docs.)
"""

import re
from collections.abc import Mapping
from typing import Any

import torch

from ...kernels.layout import pack_fields, unpack_fields
from ..errors import ExpertsError, SchemeError
from ..scheme import Linears, QuantScheme, WeightScheme, combine
from ..states import ExpertTensors
from .method import SCALE_DTYPES, Field, PackedForm

FORMATS = {None: 1, "gptq": 1, "gptq_v2": 0}
"""checkpoint_format -> what is added to a stored zero point."""


class GPTQ:
    """`QuantMethod` of quant_method "gptq"."""

    packed_field = "qweight"

    def find_scheme(self, config: Mapping[str, Any], module: str, linears: Linears) -> QuantScheme | None:
        """The config's settings with `dynamic` overrides, by the first pattern that matches a linear."""
        found: dict[str, dict[str, WeightScheme | None]] = {}
        schemes: dict[str | None, WeightScheme | None] = {}
        for role, names in linears.items():
            for name in names:
                pattern = _override(config, name)
                if pattern not in schemes:
                    schemes[pattern] = _weight_scheme(config, pattern)
                found.setdefault(role, {})[name] = schemes[pattern]
        return combine("gptq", module, found)

    def sizes(self, packed_shape: tuple[int, ...], *, bits: int) -> tuple[int, int]:
        """(N, K) of [K*bits/32, N]."""
        return packed_shape[1], packed_shape[0] * 32 // bits

    def fields(self, scheme: WeightScheme, *, size_n: int, size_k: int) -> tuple[Field, ...]:
        """The tensors of one projection."""
        groups = 1 if scheme.group_size is None else -(-size_k // scheme.group_size)
        words_k, words_n = -(-size_k * scheme.bits // 32), -(-size_n * scheme.bits // 32)
        int32 = (torch.int32,)
        return (
            Field(name="qweight", becomes="weight_packed", dtypes=int32, shape=(words_k, size_n)),
            Field(name="scales", becomes="weight_scale", dtypes=SCALE_DTYPES, shape=(groups, size_n)),
            Field(
                name="qzeros",
                becomes=None if scheme.symmetric else "weight_zero_point",
                dtypes=int32,
                shape=(groups, words_n),
                required=not scheme.symmetric,
            ),
            Field(
                name="g_idx",
                becomes="weight_g_idx",
                dtypes=(torch.int32, torch.int64),
                shape=(size_k,),
                required=scheme.act_order,
            ),
            Field(name="bias", becomes="weight_bias", dtypes=SCALE_DTYPES, shape=(size_n,), required=False),
        )

    def effective_bits(
        self, experts: ExpertTensors, projections: tuple[str, ...], scheme: WeightScheme
    ) -> int:
        """8 where a 4-bit matrix of the first format stores a 15 anywhere: its zero is 16."""
        first = f"{experts.module.experts[0]}.{projections[0]}.qweight"
        size_n = experts.shapes[first][1][1]
        if size_n % (32 // scheme.bits):
            raise ExpertsError(
                f"{experts.full_name(first)}: expected a number of columns in whole words of "
                f"{32 // scheme.bits} x {scheme.bits} bits, because GPTQ's tools pack no others, "
                f"got {size_n}."
            )
        highest = 0
        for expert in experts.module.experts:
            for projection in projections:
                key = f"{expert}.{projection}.qzeros"
                if key not in experts.shapes:
                    continue
                stored = unpack_fields(experts.read(key), bits=scheme.bits)
                low, high = int(stored.min()), int(stored.max())
                highest = max(highest, high + scheme.zero_offset)
                if scheme.symmetric:
                    _check_symmetric(experts.full_name(key), low, high, scheme)
        if scheme.symmetric or highest < 2**scheme.bits:
            return scheme.bits
        if scheme.bits == 4:
            return 8
        raise ExpertsError(
            f"{experts.name}: expected zero points of {', '.join(projections)} up to {2**scheme.bits - 1}, "
            f"which {scheme.bits} bits hold, got {highest} (stored as {highest - scheme.zero_offset} in "
            "GPTQ's first format). Marlin cannot run it; quantize again symmetrically."
        )

    def canonical(
        self, becomes: str, stacked: torch.Tensor, scheme: WeightScheme, *, bits: int
    ) -> torch.Tensor:
        """Transposed, zero points as they are meant, and widened where `bits` says so."""
        if becomes in ("weight_g_idx", "weight_bias"):
            return stacked
        turned = stacked.transpose(-1, -2)  # [B, R, N, words of K or G], zero points [B, R, words of N, G]
        if becomes == "weight_scale":
            return turned.contiguous()
        if becomes == "weight_packed":
            return turned.contiguous() if bits == scheme.bits else widen(turned, scheme.bits, bits)
        zeros = unpack_fields(stacked, bits=scheme.bits) + scheme.zero_offset  # [B, R, G, N]
        return pack_fields(zeros, bits=bits).transpose(-1, -2).contiguous()

    def stored(self, field: Field, canonical: torch.Tensor | None, form: PackedForm) -> torch.Tensor:
        """Turned back, zero points as this format stores them, and narrowed where they had been widened."""
        if canonical is None:  # symmetric: every zero point is the middle
            middle = 2 ** (form.scheme.bits - 1) - form.scheme.zero_offset
            zeros = torch.full((*field.shape[:-1], form.size_n), middle, device="cpu")
            return pack_fields(zeros, bits=form.scheme.bits)
        if field.becomes in ("weight_g_idx", "weight_bias"):
            return canonical
        turned = canonical.transpose(-1, -2)  # [words of K or G, N], zero points [G, words of N]
        if field.becomes == "weight_zero_point":
            zeros = unpack_fields(turned, bits=form.bits) - form.scheme.zero_offset
            return pack_fields(_holding(field, zeros, form.scheme), bits=form.scheme.bits)
        if field.becomes == "weight_packed" and form.bits != form.scheme.bits:
            values = _holding(field, unpack_fields(canonical, bits=form.bits), form.scheme)
            return pack_fields(values, bits=form.scheme.bits).transpose(-1, -2).contiguous()
        return turned.contiguous()


def widen(words: torch.Tensor, source_bits: int, bits: int) -> torch.Tensor:
    """Packed words [..., W] with their fields stored in other bits each: [..., W*bits/source_bits]."""
    return pack_fields(unpack_fields(words, bits=source_bits), bits=bits)


def _holding(field: Field, values: torch.Tensor, scheme: WeightScheme) -> torch.Tensor:
    """The values, which have to be such as this format stores in the scheme's bits."""
    low, high = int(values.min()), int(values.max())
    if low < 0 or high >= 2**scheme.bits:
        raise ExpertsError(
            f"{field.name}: expected values 0 .. {2**scheme.bits - 1}, which its {scheme.bits} bits store, "
            f"got {low} .. {high}."
        )
    return values


def _check_symmetric(name: str, low: int, high: int, scheme: WeightScheme) -> None:
    """`sym` says that every zero is the middle."""
    stored = 2 ** (scheme.bits - 1) - scheme.zero_offset
    if low != stored or high != stored:
        form = "gptq (zeros minus one)" if scheme.zero_offset else "gptq_v2"
        raise ExpertsError(
            f"{name}: expected every stored zero point to be {stored}, because the config says sym and its "
            f"checkpoint_format is {form}, got {low} .. {high}. Where the zeros are right, correct sym or "
            "checkpoint_format in the config; else the config is of another checkpoint."
        )


def _override(config: Mapping[str, Any], name: str) -> str | None:
    """The first pattern of `dynamic` that matches a linear, or None."""
    dynamic = config.get("dynamic") or {}
    if not isinstance(dynamic, Mapping):
        raise SchemeError(
            f"quantization_config.dynamic: expected patterns and overrides, got {type(dynamic).__name__}."
        )
    for pattern in dynamic:
        try:
            if re.match(pattern.removeprefix("-:").removeprefix("+:"), name):
                return str(pattern)
        except (re.error, OverflowError, RecursionError) as error:
            raise SchemeError(
                f"quantization_config.dynamic: expected regular expressions, got {pattern!r}: {error}."
            ) from error
    return None


def _weight_scheme(config: Mapping[str, Any], pattern: str | None) -> WeightScheme | None:
    where = "quantization_config"
    settings = dict(config)
    if pattern is not None:
        if pattern.startswith("-:"):
            return None
        where = f"quantization_config.dynamic[{pattern!r}]"
        overrides = config["dynamic"][pattern]
        if not isinstance(overrides, Mapping):
            raise SchemeError(f"{where}: expected an object of overrides, got {overrides!r}.")
        settings.update(overrides)
    form = settings.get("checkpoint_format")
    if not isinstance(form, str | None) or form not in FORMATS:
        raise SchemeError(
            f"{where}.checkpoint_format: expected gptq, gptq_v2 or none, got {form!r}. Other formats are "
            "repacked for one kernel already; use the original checkpoint."
        )
    if settings.get("pack_dtype", "int32") not in ("int32", "torch.int32"):
        raise SchemeError(f"{where}.pack_dtype: expected int32, got {settings['pack_dtype']!r}.")
    bits, group_size = integer(settings, "bits", where), integer(settings, "group_size", where)
    symmetric, desc_act = settings.get("sym", True), settings.get("desc_act", False)
    for key, value in (("sym", symmetric), ("desc_act", desc_act)):
        if not isinstance(value, bool):
            raise SchemeError(f"{where}.{key}: expected true or false, got {value!r}.")
    return WeightScheme(
        bits=bits,
        group_size=None if group_size == -1 else group_size,
        symmetric=symmetric,
        act_order=desc_act and group_size != -1,
        zero_offset=FORMATS[form],
        where=where,
    )


def integer(settings: Mapping[str, Any], key: str, where: str) -> int:
    """A setting that has to be there and be an integer."""
    value = settings.get(key)
    if isinstance(value, bool) or not isinstance(value, int):
        raise SchemeError(f"{where}.{key}: expected an integer, got {value!r}.")
    return value
