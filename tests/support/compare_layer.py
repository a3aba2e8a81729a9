"""A layer against the oracle's: every tensor's bytes, and every fact."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import torch

from marlin_moe import MarlinMoELayer
from oracle import ExpectedLayer, ExpectedMatrix, Expert, expected_dense, expected_layer


def equal_bytes(got: torch.Tensor | None, expected: torch.Tensor | None, what: str) -> None:
    """Equal dtype, shape and bytes (NaN equals itself, 0 is not −0), or the first place that differs."""
    if expected is None or got is None:
        assert got is None, f"{what}: present, expected None"
        assert expected is None, f"{what}: None, expected {tuple(expected.shape)}"
        return
    assert (got.dtype, got.shape) == (expected.dtype, expected.shape), (
        f"{what}: {got.dtype} {tuple(got.shape)}, expected {expected.dtype} {tuple(expected.shape)}"
    )
    ours, theirs = (t.cpu().contiguous().view(-1).view(torch.uint8) for t in (got, expected))
    wrong = (ours != theirs).view(-1, max(1, got.element_size())).any(1).nonzero()
    if len(wrong):
        where = torch.unravel_index(wrong[0, 0], got.shape)
        place = tuple(int(index) for index in where)
        raise AssertionError(
            f"{what}{list(place)}: {got[place].item()}, expected {expected[place].item()}, "
            f"{len(wrong)} of {got.numel()} differ"
        )


def same_layer(got: MarlinMoELayer, expected: MarlinMoELayer) -> None:
    """Two layers of ours have the same tensors and facts."""
    ours, theirs = dict(got.tensors()), dict(expected.tensors())
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        equal_bytes(tensor, theirs[name], name)
    for fact in ("num_global_experts", "intermediate_size", "gated", "tp", "ep", "top_k", "max_tokens"):
        assert getattr(got, fact) == getattr(expected, fact), fact
    assert (got.w13.format, got.w2.format) == (expected.w13.format, expected.w2.format)


def as_expected(
    layer: MarlinMoELayer,
    experts: Sequence[Expert],
    *,
    act_order: bool = False,
    expected: ExpectedLayer | None = None,
    **rank: int,
) -> None:
    """The layer of a rank (tp_rank, tp_size, ep_rank, ep_size) has the oracle's bytes, facts, values."""
    expected = expected or expected_layer(experts, **rank)
    _matrix_as_expected(layer, "w13", expected.w13, ordered=act_order and experts[0].gate.num_groups > 1)
    _matrix_as_expected(layer, "w2", expected.w2, ordered=False)
    ordered = act_order and experts[0].down.num_groups > 1
    equal_bytes(
        layer.intermediate_order, expected.intermediate_order if ordered else None, "intermediate_order"
    )
    equal_bytes(layer.expert_map, expected.expert_map, "expert_map")
    for fact in ("intermediate_size", "hidden_size", "num_experts", "num_global_experts"):
        assert getattr(layer, fact) == getattr(expected, fact), fact
    for name, got, dense in zip(
        ("w13", "w2"), layer.dequantize(), expected_dense(experts, **rank), strict=True
    ):
        equal_bytes(got, dense, f"dequantize {name}")


def _matrix_as_expected(layer: MarlinMoELayer, name: str, expected: ExpectedMatrix, *, ordered: bool) -> None:
    matrix = getattr(layer, name)
    for field in ("qweight", "scales", "zero_points", "bias"):
        equal_bytes(getattr(matrix, field), getattr(expected, field), f"{name}.{field}")
    equal_bytes(matrix.sort_order, expected.sort_order if ordered else None, f"{name}.sort_order")
    form = matrix.format
    assert (form.bits, form.group_size, form.symmetric) == (
        expected.bits,
        expected.group_size,
        expected.symmetric,
    )


def hashes(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """SHA-256 of every tensor's memory, to see later that it was not written to."""
    return {
        name: hashlib.sha256(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
        for name, tensor in tensors.items()
    }
