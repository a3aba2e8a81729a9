"""One projection of all experts of a layer in the Marlin layout: `QuantFormat` and `MarlinMatrix`."""

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from . import layout
from .errors import LayerError

GROUP_SIZES = (32, 64, 128)
SCALE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantFormat:
    """How a matrix is quantized: w = (q - zero) * scale.

    Attributes:
        bits: 4 or 8; q is unsigned, 0 .. 2**bits - 1.
        group_size: inputs (along K) that share a scale: 32, 64 or 128; None is one scale per column.
        symmetric: the zero is 2**(bits - 1) for all; else every group and column has its own.
    """

    bits: int
    group_size: int | None
    symmetric: bool

    def __post_init__(self) -> None:
        if self.bits not in layout.BITS:
            raise LayerError(f"bits: expected 4 or 8, which Marlin has, got {self.bits}.")
        if self.group_size is not None and self.group_size not in GROUP_SIZES:
            raise LayerError(
                "group_size: expected 32, 64, 128 or None (one scale per column), which Marlin has, got "
                f"{self.group_size}."
            )

    def __str__(self) -> str:
        group = "one group" if self.group_size is None else f"groups of {self.group_size}"
        return f"int{self.bits}, {group}, {'symmetric' if self.symmetric else 'asymmetric'}"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MarlinMatrix:
    """A stacked K x N matrix of E experts in the Marlin layout (`layout`), with G groups along K.

    Attributes:
        qweight: int32 [E, K/16, N*bits/2].
        scales: bf16, fp16 or float32 [E, G, N], in Marlin order.
        zero_points: int32 [E, G, N*bits/32], or None when symmetric.
        sort_order: int32 [E, K], the source column at each position of K; None when K is in source order.
        bias: [E, N] of the scales' dtype, in Marlin order, or None.
        format: the `QuantFormat`; its group_size is None exactly when G = 1.

    Raises:
        LayerError: a shape, dtype or device that does not fit the others; all problems in one text.
    """

    qweight: torch.Tensor
    scales: torch.Tensor
    format: QuantFormat
    zero_points: torch.Tensor | None = None
    sort_order: torch.Tensor | None = None
    bias: torch.Tensor | None = None

    def __post_init__(self) -> None:
        problems = list(self._problems())
        if problems:
            raise LayerError("\n".join(problems))

    @property
    def num_experts(self) -> int:
        """E."""
        return self.qweight.shape[0]

    @property
    def size_k(self) -> int:
        """K: inputs."""
        return self.qweight.shape[1] * layout.TILE_K

    @property
    def size_n(self) -> int:
        """N: outputs."""
        return self.qweight.shape[2] * 2 // self.format.bits

    @property
    def num_groups(self) -> int:
        """G: scales along K of one column."""
        return self.scales.shape[1]

    @property
    def device(self) -> torch.device:
        """The device of all tensors."""
        return self.qweight.device

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for _, tensor in self.tensors())

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(field name, tensor) of every tensor that is there."""
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, torch.Tensor):
                yield field.name, value

    def to(self, device: torch.device) -> "MarlinMatrix":
        """The same matrix on another device."""
        moved: dict[str, Any] = {name: tensor.to(device) for name, tensor in self.tensors()}
        return replace(self, **moved)

    def dequantize(self, experts: torch.Tensor) -> torch.Tensor:
        """float32 [n, N, K] of the experts named by int64 [n], with K in source order: exact values.

        (q - zero) * scale is rounded once, to float32; for bf16 and fp16 scales it is exact.
        """
        bits = self.format.bits
        words = layout.unpack_qweight(self.qweight[experts], bits=bits)  # [n, N, K*bits/32]
        q = layout.unpack_fields(words, bits=bits)  # [n, N, K]
        n, size_n, size_k = q.shape
        grouped = q.view(n, size_n, self.num_groups, size_k // self.num_groups)
        if self.zero_points is None:
            centered = grouped - 2 ** (bits - 1)
        else:
            zeros = layout.zero_point_values(self.zero_points[experts], bits=bits)  # [n, G, N]
            centered = grouped - zeros.transpose(1, 2).unsqueeze(-1)
        scales = layout.unpermute_scales(self.scales[experts]).to(torch.float32)  # [n, N, G]
        dense: torch.Tensor = (centered.to(torch.float32) * scales.unsqueeze(-1)).view(n, size_n, size_k)
        if self.sort_order is None:
            return dense
        source = self.sort_order[experts].long().unsqueeze(1).expand_as(dense)
        return torch.empty_like(dense).scatter_(2, source, dense)

    def column_bias(self) -> torch.Tensor | None:
        """float32 [E, N] bias in column order, or None."""
        return None if self.bias is None else layout.unpermute_bias(self.bias).to(torch.float32)

    def _problems(self) -> Iterator[str]:
        words, bits = self.qweight, self.format.bits
        for name, tensor in self.tensors():
            if tensor.is_neg():
                yield (
                    f"{name}: expected a tensor whose bytes are its values, got a view that is negated "
                    f"lazily. Give {name}.resolve_neg()."
                )
        if words.dtype != torch.int32 or words.dim() != 3 or words.shape[2] * 2 % bits:
            yield f"qweight: expected int32 [E, K/16, N*{bits}/2], got {words.dtype} {tuple(words.shape)}."
            return
        if not words.is_contiguous():
            yield f"qweight: expected contiguous, got strides {words.stride()}. Give qweight.contiguous()."
        e, k, n = self.num_experts, self.size_k, self.size_n
        if k % 64 or n % 64 or not k or not n:
            yield f"qweight: expected K and N to be multiples of 64, as Marlin's tiles are, got K={k}, N={n}."
            return
        if self.scales.dtype not in SCALE_DTYPES or self.scales.dim() != 3:
            yield f"scales: expected bfloat16, float16 or float32 [E, G, N], got {_describe(self.scales)}."
            return
        g = self.num_groups
        size = self.format.group_size
        if (g == 1) != (size is None) or (size is not None and g * size != k):
            wanted = "1 (group_size None)" if size is None else f"K / group_size = {k} / {size} > 1"
            yield f"scales: expected {wanted} groups, got {g} in shape {tuple(self.scales.shape)}."
        if self.format.symmetric == (self.zero_points is not None):
            found = "absent" if self.zero_points is None else "present"
            yield f"zero_points: expected exactly when asymmetric ({self.format}), but they are {found}."
        yield from self._shape_problems(
            scales=(None, (e, g, n)),
            zero_points=(torch.int32, (e, g, n * bits // 32)),
            sort_order=(torch.int32, (e, k)),
            bias=(self.scales.dtype, (e, n)),
        )

    def _shape_problems(self, **expected: tuple[torch.dtype | None, tuple[int, ...]]) -> Iterator[str]:
        for name, (dtype, shape) in expected.items():
            tensor = getattr(self, name)
            if tensor is None:
                continue
            if tuple(tensor.shape) != shape or (dtype is not None and tensor.dtype != dtype):
                wanted = f"{dtype} {shape}" if dtype else f"{shape}"
                yield (
                    f"{name}: expected {wanted} beside qweight {tuple(self.qweight.shape)} ({self.format}), "
                    f"got {_describe(tensor)}."
                )
            if tensor.device != self.device:
                yield f"{name}: expected on {self.device} as qweight is, got {tensor.device}."
            if not tensor.is_contiguous():
                yield f"{name}: expected contiguous, got strides {tensor.stride()}."


def _describe(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} {tuple(tensor.shape)}"
