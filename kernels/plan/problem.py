"""What decides how a call runs: `LayerFacts` of the layer, `MoEProblem` of the call."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ..errors import LayerError, OpError

if TYPE_CHECKING:
    from ..layer import MarlinMoELayer
    from ..matrix import MarlinMatrix


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixFacts:
    """One projection of all experts: K x N, bits, groups along K, and which tensors it has."""

    size_k: int
    size_n: int
    bits: int
    num_groups: int
    zero_points: bool
    sort_order: bool
    bias: bool

    @classmethod
    def of(cls, matrix: "MarlinMatrix") -> "MatrixFacts":
        """The facts of a matrix."""
        return cls(
            size_k=matrix.size_k,
            size_n=matrix.size_n,
            bits=matrix.format.bits,
            num_groups=matrix.num_groups,
            zero_points=matrix.zero_points is not None,
            sort_order=matrix.sort_order is not None,
            bias=matrix.bias is not None,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerFacts:
    """A layer without its tensors.

    Attributes:
        num_experts: E, of this rank.
        num_global_experts: experts that router ids count.
        gated: w13's N is 2 * Ip (gate and up) instead of Ip.
        w13, w2: K = H, N as above; K = Ip, N = H.
        scales_dtype: dtype of the scales.

    Raises:
        LayerError: the sizes of w13 and w2 do not fit together.
    """

    num_experts: int
    num_global_experts: int
    gated: bool
    w13: MatrixFacts
    w2: MatrixFacts
    scales_dtype: torch.dtype

    def __post_init__(self) -> None:
        halves = 2 if self.gated else 1
        if self.w13.size_n != halves * self.w2.size_k or self.w13.size_k != self.w2.size_n:
            raise LayerError(
                f"w13: expected K = {self.w2.size_n} and N = {halves * self.w2.size_k}, because w2 is "
                f"{self.w2.size_k} x {self.w2.size_n} and gated is {self.gated}, "
                f"got K = {self.w13.size_k}, N = {self.w13.size_n}."
            )

    @classmethod
    def of(cls, layer: "MarlinMoELayer") -> "LayerFacts":
        """The facts of a layer."""
        return cls(
            num_experts=layer.num_experts,
            num_global_experts=layer.num_global_experts,
            gated=layer.gated,
            w13=MatrixFacts.of(layer.w13),
            w2=MatrixFacts.of(layer.w2),
            scales_dtype=layer.scales_dtype,
        )

    @property
    def hidden_size(self) -> int:
        """H."""
        return self.w2.size_n

    @property
    def padded_intermediate_size(self) -> int:
        """Ip: the intermediate size as it lies in memory."""
        return self.w2.size_k

    def __str__(self) -> str:
        return f"E={self.num_experts}, H={self.hidden_size}, Ip={self.padded_intermediate_size}"


@dataclass(frozen=True, slots=True, kw_only=True)
class MoEProblem:
    """One call of the op, without its tensors.

    Attributes:
        layer: the layer's facts.
        tokens: M.
        top_k: T, slots per token.
        x_dtype: dtype of x and of the result.
        device_type: "cpu", "cuda", ...
        activation: its kind.
        apply_router_weight_on_input: weights multiply x instead of the result.
        expert_map: router ids go through a map.

    Raises:
        OpError: sizes that no call has.
    """

    layer: LayerFacts
    tokens: int
    top_k: int
    x_dtype: torch.dtype
    device_type: str
    activation: str = "silu"
    apply_router_weight_on_input: bool = False
    expert_map: bool = False

    def __post_init__(self) -> None:
        if self.tokens < 0 or self.top_k < 1:
            raise OpError(
                f"problem: expected tokens >= 0 and top_k >= 1, got tokens={self.tokens}, top_k={self.top_k}."
            )
