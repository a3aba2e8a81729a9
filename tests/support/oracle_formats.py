"""Checkpoint words → integers → exact float weights, one field at a time.

Letters: a matrix has N output rows, K input columns, G groups along K; a word has P = 32 / bits fields.
Integers are int32 tensors, so that a zero point of 16 (GPTQ's wrapped 15) or 256 fits.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

AWQ_COLUMN_OF_FIELD = (0, 2, 4, 6, 1, 3, 5, 7)


def _field(words: npt.NDArray[np.int32], index: int, bits: int) -> npt.NDArray[np.int32]:
    """Field number `index` of every word, counted from the low end."""
    return ((words.view(np.uint32) >> np.uint32(index * bits)) & np.uint32((1 << bits) - 1)).astype(np.int32)


def _words(tensor: torch.Tensor) -> npt.NDArray[np.int32]:
    assert (tensor.dtype, tensor.dim()) == (torch.int32, 2), (tensor.dtype, tensor.shape)
    return np.ascontiguousarray(tensor.numpy())


def unpack_ct(weight_packed: torch.Tensor, bits: int) -> torch.Tensor:
    """[N, K·bits/32] → unsigned values [N, K]: a word holds P neighbours along K, low bits first."""
    words = _words(weight_packed)
    per_word = 32 // bits
    values = np.zeros((words.shape[0], words.shape[1] * per_word), dtype=np.int32)
    for i in range(per_word):
        values[:, i::per_word] = _field(words, i, bits)
    return torch.from_numpy(values)


def unpack_ct_zero_points(weight_zero_point: torch.Tensor, bits: int) -> torch.Tensor:
    """[N·bits/32, G] → unsigned zero points [N, G]: a word holds P neighbours along N."""
    words = _words(weight_zero_point)
    per_word = 32 // bits
    zeros = np.zeros((words.shape[0] * per_word, words.shape[1]), dtype=np.int32)
    for i in range(per_word):
        zeros[i::per_word, :] = _field(words, i, bits)
    return torch.from_numpy(zeros)


def unpack_gptq(qweight: torch.Tensor, bits: int) -> torch.Tensor:
    """[K·bits/32, N] → unsigned values [N, K]: a word holds P neighbours along K."""
    return unpack_ct_zero_points(qweight, bits).T.contiguous()


def unpack_gptq_zero_points(qzeros: torch.Tensor, bits: int, *, minus_one: bool) -> torch.Tensor:
    """[G, N·bits/32] → zero points [N, G]. Version 1 of the format stores zero − 1: a stored 15 means 16."""
    stored = unpack_ct(qzeros, bits)  # [G, N]
    return (stored + 1 if minus_one else stored).T.contiguous()


def unpack_awq(words_of_columns: torch.Tensor, bits: int) -> torch.Tensor:
    """qweight [K, N/8] → values [N, K], and qzeros [G, N/8] → zero points [N, G].

    Field i of word j belongs to column 8j + (0, 2, 4, 6, 1, 3, 5, 7)[i].
    """
    assert bits == 4, "AWQ stores 4 bits"
    words = _words(words_of_columns)
    values = np.zeros((words.shape[0], words.shape[1] * 8), dtype=np.int32)
    for i, column in enumerate(AWQ_COLUMN_OF_FIELD):
        values[:, column::8] = _field(words, i, bits)
    return torch.from_numpy(np.ascontiguousarray(values.T))


def group_of_columns(num_columns: int, num_groups: int, g_idx: torch.Tensor | None) -> torch.Tensor:
    """The group of every column k: g_idx[k], or k // (K / G) where there is no g_idx."""
    if g_idx is not None:
        return g_idx.long()
    assert num_columns % num_groups == 0, (num_columns, num_groups)
    group_size = num_columns // num_groups
    return torch.tensor([k // group_size for k in range(num_columns)])


def dequantize(
    values: torch.Tensor,
    scales: torch.Tensor,
    zero_points: torch.Tensor | None,
    g_idx: torch.Tensor | None,
    bits: int,
) -> torch.Tensor:
    """float32 [N, K] = (value − zero) · scale, computed in float64 and rounded once.

    values [N, K], scales [N, G] of any float type, zero_points [N, G] or None (2^(bits−1)), g_idx [K].
    """
    group = group_of_columns(values.shape[1], scales.shape[1], g_idx)
    scale = scales.double()[:, group]  # [N, K]
    zero = 2 ** (bits - 1) if zero_points is None else zero_points.double()[:, group]
    return ((values.double() - zero) * scale).float()
