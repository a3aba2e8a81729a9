"""A `MarlinMoELayer` of random words: any bits are valid values, so no checkpoint is needed."""

from __future__ import annotations

from typing import Any

import torch

from marlin_moe import MarlinMoELayer
from oracle import marlin_bias, marlin_scales


def random_layer(
    seed: int = 0,
    *,
    num_experts: int = 5,
    hidden_size: int = 128,
    padded_intermediate_size: int = 64,
    bits: int = 4,
    group_size: int | None = 32,
    symmetric: bool = True,
    dtype: torch.dtype = torch.bfloat16,
    gated: bool = True,
    **facts: Any,
) -> MarlinMoELayer:
    """E experts whose weights are about 0.1.

    Where `intermediate_size` is below the padded one, w13's padded columns are 0 and w2's padded rows stay
    random, so that activations which are not 0 there would be seen.
    """
    made = torch.Generator().manual_seed(seed)
    width = padded_intermediate_size * (2 if gated else 1)

    def words(*shape: int) -> torch.Tensor:
        full = torch.randint(-(2**31), 2**31, shape, generator=made, dtype=torch.int64)
        return full.to(torch.int32)

    def matrix(name: str, size_k: int, size_n: int, zero_columns: slice) -> dict[str, torch.Tensor]:
        groups = 1 if group_size is None else size_k // group_size
        scales = torch.rand(num_experts, size_n, groups, generator=made) * (0.4 / 2**bits) + 0.01 / 2**bits
        halves = scales.view(num_experts, -1, padded_intermediate_size if name == "w13" else size_n, groups)
        halves[:, :, zero_columns] = 0
        tensors = {
            f"{name}_qweight": words(num_experts, size_k // 16, size_n * bits // 2),
            f"{name}_scales": torch.stack([marlin_scales(s.to(dtype)) for s in scales]),
        }
        if not symmetric:
            tensors[f"{name}_zero_points"] = words(num_experts, groups, size_n * bits // 32)
        return tensors

    padding = slice(facts.get("intermediate_size", padded_intermediate_size), padded_intermediate_size)
    return MarlinMoELayer.from_marlin(
        **matrix("w13", hidden_size, width, padding),
        **matrix("w2", padded_intermediate_size, hidden_size, slice(0, 0)),
        bits=bits,
        group_size=group_size,
        symmetric=symmetric,
        gated=gated,
        **{"max_tokens": 64} | facts,
    )


def random_bias(
    seed: int, num_experts: int, size_n: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """(bias [E, N] in column order, the same in Marlin order)."""
    columns = torch.randn(num_experts, size_n, generator=torch.Generator().manual_seed(seed)).to(dtype)
    return columns, torch.stack([marlin_bias(row) for row in columns])


def random_calls(
    seed: int, tokens: int, top_k: int, layer: MarlinMoELayer, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x [M, H] of `dtype`, topk_weights float32 [M, T], topk_ids int64 [M, T]; a token may repeat an id."""
    made = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, layer.hidden_size, generator=made).to(dtype)
    weights = torch.rand(tokens, top_k, generator=made)
    return x, weights, torch.randint(layer.num_global_experts, (tokens, top_k), generator=made)


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Frobenius norm of the difference over that of the expected values; 0 for two empty tensors."""
    assert got.shape == expected.shape, (got.shape, expected.shape)
    difference = (got.double() - expected.double()).norm().item()
    return difference / expected.double().norm().item() if difference else 0.0
