"""quantization_config -> the `QuantScheme` of one MoE layer.

How a config is read depends on its quant_method: one file per method in `quant_methods`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from ..kernels.checks import check_type
from ..kernels.layout import BITS
from ..kernels.matrix import GROUP_SIZES
from .errors import SchemeError
from .experts.spellings import COMMON

Linears: TypeAlias = Mapping[str, tuple[str, ...]]
"""Role (gate, up, down) -> the full module names of those linears, one per expert."""


class PartlyQuantizedError(SchemeError):
    """A config that quantizes some projections of a layer's experts and leaves others out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightScheme:
    """How the weights of one projection are quantized, as the config says.

    Attributes:
        bits: 4 or 8.
        group_size: inputs per scale: 32, 64 or 128; None is one scale per output column.
        symmetric: no zero points stored.
        act_order: columns of one group lie scattered along K, as `weight_g_idx` says.
        zero_offset: what is added to a stored zero point (1 in GPTQ's first format).
        where: the place in the config, for messages.
    """

    bits: int
    group_size: int | None
    symmetric: bool
    act_order: bool = False
    zero_offset: int = 0
    where: str = "quantization_config"

    def __post_init__(self) -> None:
        if self.bits not in BITS:
            raise SchemeError(
                f"{self.where}: expected 4 or 8 bits, which the Marlin layout has, got {self.bits}. "
                "Requantize to W4A16 or W8A16."
            )
        if self.group_size is not None and self.group_size not in GROUP_SIZES:
            raise SchemeError(
                f"{self.where}: expected group_size 32, 64, 128 or one scale per column, which Marlin's "
                f"kernels have, got {self.group_size}."
            )

    def same_format(self, other: "WeightScheme") -> bool:
        """Equal but for the place in the config."""
        return replace(self, where="") == replace(other, where="")

    def __str__(self) -> str:
        group = "one scale per column" if self.group_size is None else f"group_size {self.group_size}"
        kind = "symmetric" if self.symmetric else "asymmetric"
        return f"int{self.bits}, {group}, {kind}{', act-order' if self.act_order else ''}"


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantScheme:
    """The quantization of one layer's routed experts: all gate and up alike (`w13`), all down alike (`w2`).

    Attributes:
        quant_method: whose tensors these are: a key of `quant_methods.table.METHODS`.
        w13: of gate and up.
        w2: of down.
    """

    quant_method: str
    w13: WeightScheme
    w2: WeightScheme

    @classmethod
    def from_config(
        cls, quantization_config: Mapping[str, Any], module: str, *, linears: Linears | None = None
    ) -> "QuantScheme":
        """The scheme of the experts module named `module`, matched by the quantization tool's own rules.

        Args:
            quantization_config: as in `config.json`.
            module: e.g. `model.layers.3.mlp.experts`.
            linears: full names of the experts' gate, up and down linears; by default expert 0 under
                each common spelling, which have to agree.

        Raises:
            TypeError: a config that is no mapping, or a module's name that is no str.
            SchemeError: a config that cannot be read, names no scheme for the experts, differs between
                experts or between gate and up, or that Marlin cannot run.
        """
        scheme = cls.find(quantization_config, module, linears=linears)
        if scheme is None:
            raise SchemeError(
                f"{module}: expected quantization_config to target its experts, but no group does or "
                "`ignore` excludes them. The layer is not quantized."
            )
        return scheme

    @classmethod
    def find(
        cls, quantization_config: Mapping[str, Any], module: str, *, linears: Linears | None = None
    ) -> "QuantScheme | None":
        """Like `from_config`, but None where the config leaves every expert of the module unquantized."""
        from .quant_methods.table import METHODS

        check_type("quantization_config", quantization_config, Mapping)
        check_type("module", module, str)
        name = quantization_config.get("quant_method", "compressed-tensors")
        if not isinstance(name, str) or name not in METHODS:
            raise SchemeError(
                f"quantization_config.quant_method: expected one of {', '.join(sorted(METHODS))}, "
                f"got {name!r}."
            )
        method = METHODS[name]
        if linears is not None:
            return method.find_scheme(quantization_config, module, linears)
        found: list[QuantScheme | None] = []
        partly: PartlyQuantizedError | None = None  # a spelling may share names with the model's own
        for spelling in COMMON:
            roles = zip(("gate", "up", "down"), spelling.projections, strict=True)
            guess = {role: (f"{module}.0.{projection}",) for role, projection in roles}
            try:
                scheme = method.find_scheme(quantization_config, module, guess)
            except PartlyQuantizedError as error:
                partly = partly or error
                continue
            if scheme not in found:
                found.append(scheme)
        chosen = [scheme for scheme in found if scheme is not None]
        if len(chosen) > 1:
            raise SchemeError(
                f"{module}: expected one scheme for its experts whatever their projections are called, got "
                f"{'; '.join(str(s) for s in chosen)}. Pass linears= with the experts' own names."
            )
        if not chosen and partly is not None:
            raise partly
        return chosen[0] if chosen else None

    def __str__(self) -> str:
        if self.w13.same_format(self.w2):
            return str(self.w13)
        return f"gate and up {self.w13}; down {self.w2}"


def combine(
    quant_method: str, module: str, found: Mapping[str, Mapping[str, WeightScheme | None]]
) -> QuantScheme | None:
    """One scheme of what every linear was found to have: role -> linear name -> its scheme or None.

    Raises:
        SchemeError: experts that differ, gate unlike up, or some quantized and some not; it names two of
            them.
    """
    every = [(name, scheme) for linears in found.values() for name, scheme in linears.items()]
    plain = [name for name, scheme in every if scheme is None]
    if len(plain) == len(every):
        return None
    if plain:
        raise PartlyQuantizedError(
            f"{module}: expected all its experts to be quantized, because one Marlin layer holds one format, "
            f"got {len(plain)} of {len(every)} projections left out by quantization_config, {plain[0]} first."
        )
    w13 = _agree({name: scheme for role in ("gate", "up") for name, scheme in found.get(role, {}).items()})
    return QuantScheme(quant_method=quant_method, w13=w13, w2=_agree(found["down"]))


def _agree(schemes: Mapping[str, WeightScheme | None]) -> WeightScheme:
    (first_name, first), *others = schemes.items()
    if first is None:
        raise SchemeError(f"{first_name}: expected a quantized projection, got none.")
    for name, scheme in others:
        if scheme is not None and not scheme.same_format(first):
            raise SchemeError(
                f"{name}: expected {first} as {first_name} has ({first.where}), because they share one "
                f"Marlin matrix, got {scheme} ({scheme.where}). Marlin cannot run experts that differ; "
                "requantize them alike."
            )
    return first
