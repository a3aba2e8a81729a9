"""One matrix in the Marlin layout and back, position by position; N and K as in a weight [N, K]."""

from __future__ import annotations

import numpy as np
import torch

ZERO_POINT_ORDER = {4: (0, 2, 4, 6, 1, 3, 5, 7), 8: (0, 2, 1, 3)}


def marlin_qweight(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Unsigned values [N, K] → int32 [K/16, N·bits/2].

    The loops run over the positions inside one tile of 16 k by 64 n; slices with steps of 16 and 64 visit
    the same position of every tile.
    """
    num_n, num_k = values.shape
    assert (num_n % 64, num_k % 16) == (0, 0), (num_n, num_k)
    fields = values.numpy().astype(np.uint32)
    assert int(fields.max(initial=0)) < 1 << bits
    tile = 32 * bits
    words = np.zeros((num_k // 16, num_n // 64 * tile), dtype=np.uint32)
    for word, content in _words_of_tile(bits):
        for position, (k, n) in enumerate(content):
            words[:, word::tile] |= fields[n::64, k::16].T << np.uint32(position * bits)
    return torch.from_numpy(words.view(np.int32))


def values_of_marlin(qweight: torch.Tensor, bits: int) -> torch.Tensor:
    """The inverse: int32 [K/16, N·bits/2] → unsigned int32 values [N, K]."""
    words = np.ascontiguousarray(qweight.numpy()).view(np.uint32)
    tile = 32 * bits
    values = np.full((words.shape[1] // tile * 64, words.shape[0] * 16), -1, dtype=np.int32)
    for word, content in _words_of_tile(bits):
        for position, (k, n) in enumerate(content):
            field = (words[:, word::tile] >> np.uint32(position * bits)) & np.uint32((1 << bits) - 1)
            values[n::64, k::16] = field.T.astype(np.int32)
    assert int(values.min(initial=0)) >= 0, "a position that no field holds"
    return torch.from_numpy(values)


def _words_of_tile(bits: int) -> list[tuple[int, list[tuple[int, int]]]]:
    """Every word of a tile of 16 k by 64 n: its number and, low to high, the (k, n) of each field."""
    words = []
    for lane in range(32):
        for j in range(4):
            words += _words_of_lane(lane, j, 2 * (lane % 4), 16 * j + lane // 4, bits)
    return words


def _words_of_lane(lane: int, j: int, k0: int, n0: int, bits: int) -> list[tuple[int, list[tuple[int, int]]]]:
    if bits == 4:
        low = [(k0, n0), (k0 + 8, n0), (k0, n0 + 8), (k0 + 8, n0 + 8)]
        high = [(k0 + 1, n0), (k0 + 9, n0), (k0 + 1, n0 + 8), (k0 + 9, n0 + 8)]
        return [(4 * lane + j, low + high)]
    assert bits == 8, bits
    return [
        (8 * lane + 2 * j, [(k0, n0), (k0 + 8, n0), (k0 + 1, n0), (k0 + 9, n0)]),
        (8 * lane + 2 * j + 1, [(k0, n0 + 8), (k0 + 8, n0 + 8), (k0 + 1, n0 + 8), (k0 + 9, n0 + 8)]),
    ]


def grouped_columns(num_n: int) -> list[int]:
    """The source column at each position when G > 1: per 64 columns, position 8i+j holds column i+8j."""
    assert num_n % 64 == 0, num_n
    columns = [-1] * num_n
    for block in range(0, num_n, 64):
        for i in range(8):
            for j in range(8):
                columns[block + 8 * i + j] = block + i + 8 * j
    return columns


def single_columns(num_n: int) -> list[int]:
    """The same when G = 1: per 32 columns, position 8i+p holds column 2i + (0,1,8,9,16,17,24,25)[p]."""
    assert num_n % 32 == 0, num_n
    columns = [-1] * num_n
    for block in range(0, num_n, 32):
        for i in range(4):
            for p, offset in enumerate((0, 1, 8, 9, 16, 17, 24, 25)):
                columns[block + 8 * i + p] = block + 2 * i + offset
    return columns


def marlin_scales(scales: torch.Tensor) -> torch.Tensor:
    """[N, G] → [G, N], in the grouped order when G > 1, else in the single order. The dtype stays."""
    num_n, num_groups = scales.shape
    columns = grouped_columns(num_n) if num_groups > 1 else single_columns(num_n)
    return scales.T[:, columns].contiguous()


def scales_of_marlin(scales: torch.Tensor) -> torch.Tensor:
    """The inverse: [G, N] → [N, G]."""
    num_groups, num_n = scales.shape
    columns = grouped_columns(num_n) if num_groups > 1 else single_columns(num_n)
    out = torch.empty(num_n, num_groups, dtype=scales.dtype)
    out[columns] = scales.T
    return out


def marlin_zero_points(zero_points: torch.Tensor, bits: int) -> torch.Tensor:
    """Unsigned [N, G] → int32 [G, N·bits/32]: grouped order for any G, interleaved, packed low to high."""
    num_n, num_groups = zero_points.shape
    order, columns = ZERO_POINT_ORDER[bits], grouped_columns(num_n)
    assert 0 <= int(zero_points.min()) <= int(zero_points.max()) < 1 << bits, "does not fit into a field"
    fields = zero_points.numpy().astype(np.uint32)
    words = np.zeros((num_groups, num_n // len(order)), dtype=np.uint32)
    for word in range(words.shape[1]):
        for position, within in enumerate(order):
            words[:, word] |= fields[columns[word * len(order) + within]] << np.uint32(position * bits)
    return torch.from_numpy(words.view(np.int32))


def zero_points_of_marlin(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """The inverse: int32 [G, N·bits/32] → unsigned int32 zero points [N, G]."""
    order = ZERO_POINT_ORDER[bits]
    words = np.ascontiguousarray(packed.numpy()).view(np.uint32)
    num_n = words.shape[1] * len(order)
    columns = grouped_columns(num_n)
    zeros = np.full((num_n, words.shape[0]), -1, dtype=np.int32)
    for word in range(words.shape[1]):
        for position, within in enumerate(order):
            field = (words[:, word] >> np.uint32(position * bits)) & np.uint32((1 << bits) - 1)
            zeros[columns[word * len(order) + within]] = field.astype(np.int32)
    assert int(zeros.min(initial=0)) >= 0, "a position that no field holds"
    return torch.from_numpy(zeros)


def marlin_bias(bias: torch.Tensor) -> torch.Tensor:
    """[N] → [N] in the single order, whatever the number of groups is."""
    return bias[single_columns(bias.shape[0])].contiguous()
