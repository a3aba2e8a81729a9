"""A call of the op with random tokens, and what it should give, computed in float64: `OpCall`."""

from dataclasses import dataclass

import torch

from ..kernels.fused_marlin_moe import fused_marlin_moe
from ..kernels.layer import MarlinMoELayer
from .demo_checkpoint import HIDDEN_SIZE, NUM_EXPERTS, SEED, TOP_K, Experts

TOKENS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class OpCall:
    """Random tokens and routing, and what a plain float64 loop over experts makes of them.

    x float32 [M, H] (values that bfloat16 holds), topk_weights float32 [M, T], topk_ids int32 [M, T].
    """

    x: torch.Tensor
    topk_weights: torch.Tensor
    topk_ids: torch.Tensor
    expected: torch.Tensor

    @classmethod
    def random(cls, experts: Experts) -> "OpCall":
        """A call of `TOKENS` tokens."""
        generator = torch.Generator().manual_seed(SEED + 1)
        x = torch.randn(TOKENS, HIDDEN_SIZE, generator=generator).to(torch.bfloat16).float()
        scores, ids = torch.randn(TOKENS, NUM_EXPERTS, generator=generator).softmax(1).topk(TOP_K)
        expected = torch.zeros(TOKENS, HIDDEN_SIZE, dtype=torch.float64)
        for token in range(TOKENS):
            for weight, expert in zip(scores[token].double(), ids[token].tolist(), strict=True):
                gate, up, down = experts[expert]
                row = x[token].double()
                expected[token] += weight * (down @ (torch.nn.functional.silu(gate @ row) * (up @ row)))
        return cls(x=x, topk_weights=scores, topk_ids=ids.to(torch.int32), expected=expected)

    def run(self, layer: MarlinMoELayer, dtype: torch.dtype) -> torch.Tensor:
        """The op's output [M, H] for x of `dtype`."""
        return fused_marlin_moe(self.x.to(dtype), layer, self.topk_weights, self.topk_ids)

    def error(self, layer: MarlinMoELayer, dtype: torch.dtype) -> float:
        """The largest relative error of a token, with x of `dtype`."""
        return max_relative_error(self.run(layer, dtype).double(), self.expected)


def max_relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """max over tokens of |found - expected| / |expected|, for float64 [M, H]."""
    return float(((found - expected).norm(dim=1) / expected.norm(dim=1)).max())
