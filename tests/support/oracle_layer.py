"""Experts as integers: cut for a rank, padded, stacked into Marlin tensors."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from oracle_formats import dequantize
from oracle_marlin import (
    marlin_bias,
    marlin_qweight,
    marlin_scales,
    marlin_zero_points,
    scales_of_marlin,
    values_of_marlin,
    zero_points_of_marlin,
)


class Refused(Exception):
    """This source cannot be cut for this rank: the library must refuse it too."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Projection:
    """One matrix as integers.

    values int32 [N, K], scales [N, G], zero_points int32 [N, G], g_idx int32 [K], bias [N].
    `zero_points` None is symmetric (2^(bits−1)), `g_idx` None is groups in the order of k.
    """

    values: torch.Tensor
    scales: torch.Tensor
    bits: int
    zero_points: torch.Tensor | None = None
    g_idx: torch.Tensor | None = None
    bias: torch.Tensor | None = None

    @property
    def num_groups(self) -> int:
        return self.scales.shape[1]

    @property
    def group_size(self) -> int:
        return self.values.shape[1] // self.num_groups

    def dense(self) -> torch.Tensor:
        """float32 [N, K], exact."""
        return dequantize(self.values, self.scales, self.zero_points, self.g_idx, self.bits)

    def rows(self, index: list[int]) -> Projection:
        """The output rows `index`, in that order."""
        return replace(
            self,
            values=self.values[index],
            scales=self.scales[index],
            zero_points=None if self.zero_points is None else self.zero_points[index],
            bias=None if self.bias is None else self.bias[index],
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Expert:
    """gate [I, H], up [I, H], down [H, I]."""

    gate: Projection
    up: Projection
    down: Projection


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExpectedMatrix:
    """One of w13 and w2 in Marlin layout, all experts of the rank stacked; None means absent."""

    qweight: torch.Tensor
    scales: torch.Tensor
    zero_points: torch.Tensor | None
    sort_order: torch.Tensor | None
    bias: torch.Tensor | None
    bits: int
    group_size: int | None
    symmetric: bool

    def dense(self) -> torch.Tensor:
        """float32 [E, N, K] of the Marlin tensors alone: padding included, K in the sorted order."""
        dense = []
        for e in range(self.qweight.shape[0]):
            values, scales = values_of_marlin(self.qweight[e], self.bits), scales_of_marlin(self.scales[e])
            zeros = (
                None if self.zero_points is None else zero_points_of_marlin(self.zero_points[e], self.bits)
            )
            dense.append(dequantize(values, scales, zeros, None, self.bits))
        return torch.stack(dense)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExpectedLayer:
    w13: ExpectedMatrix
    w2: ExpectedMatrix
    intermediate_order: torch.Tensor | None  # int32 [E, I of this rank]
    intermediate_size: int  # of this rank, unpadded
    hidden_size: int
    num_experts: int
    num_global_experts: int
    expert_map: torch.Tensor | None  # int32 [global experts], None without expert parallelism


def experts_of_rank(num_experts: int, rank: int, size: int) -> list[int]:
    return list(range(rank * num_experts // size, (rank + 1) * num_experts // size))


def sorting_order(projection: Projection) -> list[int]:
    """The column at each sorted position: stable by group. The identity without g_idx."""
    num_k = projection.values.shape[1]
    if projection.g_idx is None:
        return list(range(num_k))
    groups = projection.g_idx.tolist()
    for group in range(projection.num_groups):
        if groups.count(group) != projection.group_size:
            raise Refused(f"group {group} has {groups.count(group)} columns, not {projection.group_size}")
    return sorted(range(num_k), key=lambda k: groups[k])  # Python's sort is stable


def sorted_columns(projection: Projection) -> Projection:
    """Columns in the order of their groups; g_idx is spent."""
    return replace(projection, values=projection.values[:, sorting_order(projection)], g_idx=None)


def cut_and_pad_down(down: Projection, rank: int, size: int, padded: int) -> Projection:
    """Columns of a sorted w2 [H, I] for one TP rank, padded to `padded`.

    One group in the source stays one group. Else the slice must hold whole groups, perhaps after every group
    was split into equal parts of 64 or 32; purely padded groups get scale and zero point 0.
    """
    num_k = down.values.shape[1] // size
    columns = list(range(rank * num_k, (rank + 1) * num_k))
    values = torch.zeros(down.values.shape[0], padded, dtype=down.values.dtype)
    values[:, :num_k] = down.values[:, columns]
    if down.num_groups == 1:
        return replace(down, values=values)
    group_size = down.group_size
    if num_k % group_size != 0:
        fitting = [smaller for smaller in (64, 32) if num_k % smaller == 0 and group_size % smaller == 0]
        if not fitting:
            raise Refused(f"a slice of {num_k} cuts a group of {group_size}")
        group_size = fitting[0]
    # The group of the source that each group of the slice lies in.
    source_groups = [(columns[0] + first) // down.group_size for first in range(0, num_k, group_size)]
    num_groups = padded // group_size
    assert num_groups * group_size == padded

    def cut(per_group: torch.Tensor) -> torch.Tensor:
        out = torch.zeros(per_group.shape[0], num_groups, dtype=per_group.dtype)
        out[:, : len(source_groups)] = per_group[:, source_groups]
        return out

    zero_points = None if down.zero_points is None else cut(down.zero_points)
    return replace(down, values=values, scales=cut(down.scales), zero_points=zero_points)


def pad_rows(half: Projection, padded: int) -> Projection:
    """Rows up to `padded`, everything in them 0."""

    def pad(tensor: torch.Tensor) -> torch.Tensor:
        out = torch.zeros(padded, *tensor.shape[1:], dtype=tensor.dtype)
        out[: tensor.shape[0]] = tensor
        return out

    return replace(
        half,
        values=pad(half.values),
        scales=pad(half.scales),
        zero_points=None if half.zero_points is None else pad(half.zero_points),
        bias=None if half.bias is None else pad(half.bias),
    )


def concatenate(gate: Projection, up: Projection) -> Projection:
    """[gate; up] along N."""

    def both(name: str) -> torch.Tensor | None:
        first, second = getattr(gate, name), getattr(up, name)
        assert (first is None) == (second is None), f"gate and up differ in {name}"
        return None if first is None else torch.cat([first, second])

    assert gate.bits == up.bits
    values, scales = both("values"), both("scales")
    assert values is not None
    assert scales is not None
    zero_points, bias = both("zero_points"), both("bias")
    return Projection(values=values, scales=scales, bits=gate.bits, zero_points=zero_points, bias=bias)


def stack(matrices: list[Projection], orders: list[list[int]] | None) -> ExpectedMatrix:
    """Marlin tensors of one matrix of every expert, stacked along E."""
    first = matrices[0]
    assert all(m.bits == first.bits and m.scales.shape == first.scales.shape for m in matrices)
    zeros = [marlin_zero_points(m.zero_points, m.bits) for m in matrices if m.zero_points is not None]
    biases = [marlin_bias(m.bias) for m in matrices if m.bias is not None]
    assert len(zeros) in (0, len(matrices))
    assert len(biases) in (0, len(matrices))
    return ExpectedMatrix(
        qweight=torch.stack([marlin_qweight(m.values, m.bits) for m in matrices]),
        scales=torch.stack([marlin_scales(m.scales) for m in matrices]),
        zero_points=torch.stack(zeros) if zeros else None,
        sort_order=None if orders is None else torch.tensor(orders, dtype=torch.int32),
        bias=torch.stack(biases) if biases else None,
        bits=first.bits,
        group_size=None if first.num_groups == 1 else first.group_size,
        symmetric=not zeros,
    )
