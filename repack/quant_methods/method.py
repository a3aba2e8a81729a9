"""What the pipeline asks of a quantization tool: `QuantMethod`, and the tensors of a projection: `Field`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ..scheme import Linears, QuantScheme, WeightScheme
from ..states import ExpertTensors

SCALE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
INDEX_DTYPES = (torch.int32, torch.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """A tensor that a projection [N, K] has in the checkpoint.

    Attributes:
        name: the last part of its key: `weight_packed`.
        becomes: the stages' field, without the matrix' name: `weight_packed`, `weight_scale`,
            `weight_zero_point`, `weight_g_idx`, `weight_bias`; None for metadata that is only checked.
        dtypes: those allowed.
        shape: the shape in the checkpoint.
        required: absence is an error.
    """

    name: str
    becomes: str | None
    dtypes: tuple[torch.dtype, ...]
    shape: tuple[int, ...]
    required: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedForm:
    """A projection [N, K] as it flowed through the stages: its scheme, and the `bits` of its fields there."""

    scheme: WeightScheme
    bits: int
    size_n: int
    size_k: int


class QuantMethod(Protocol):
    """One quantization tool."""

    packed_field: str
    """The field whose shape tells N and K."""

    def find_scheme(self, config: Mapping[str, Any], module: str, linears: Linears) -> QuantScheme | None:
        """The scheme of a module's experts, or None where the config leaves them all unquantized."""

    def sizes(self, packed_shape: tuple[int, ...], *, bits: int) -> tuple[int, int]:
        """(N, K) that a projection's packed words have room for."""

    def fields(self, scheme: WeightScheme, *, size_n: int, size_k: int) -> tuple[Field, ...]:
        """Every tensor that a projection of this scheme may have."""

    def effective_bits(
        self, experts: ExpertTensors, projections: tuple[str, ...], scheme: WeightScheme
    ) -> int:
        """The bits that the matrix needs: the scheme's, or 8 where 4 cannot hold a zero point.

        Raises:
            ExpertsError: stored zero points that the scheme does not allow.
        """

    def canonical(
        self, becomes: str, stacked: torch.Tensor, scheme: WeightScheme, *, bits: int
    ) -> torch.Tensor:
        """Stacked tensors [B, R, *shape] of one field in compressed-tensors' layout, in `bits`."""

    def stored(self, field: Field, canonical: torch.Tensor | None, form: PackedForm) -> torch.Tensor:
        """The tensor that one projection [N, K] has in the checkpoint: the inverse of `canonical`.

        Args:
            field: which; `canonical` is None where nothing of it flowed through the stages (metadata, the
                constant zero points of a symmetric GPTQ checkpoint).
            canonical: in compressed-tensors' layout, with fields of `form.bits`.
            form: of the projection.
        """
