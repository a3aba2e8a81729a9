"""The Marlin layout and its exact inverse, in plain torch: the contract between `repack` and the op.

Letters: B experts (any leading dimensions), K x N a matrix (K inputs, N outputs), G groups along K, r = k div
16, c = n div 64. "Checkpoint layout" is compressed-tensors' pack-quantized: `weight_packed` int32 [B, N,
K*bits/32], low bits first along K. All functions take and return new tensors (no views) on the device of
their input, and give the same bytes on every device.

One lane's words. Lane l = 4q + m owns k0 = 16r + 2m and, for j = 0..3, the columns
n = 64c + 16j + q and n + 8:

    checkpoint, 4 bits: a column's 16 k's are two words; lane m takes byte m of each
        word 0: k 0 1 | 2 3 | 4 5 | 6 7        word 1: k 8 9 | 10 11 | 12 13 | 14 15
        byte m ->  a (column n), b (word 1), and c, d for column n + 8
    Marlin word j of the lane, nibbles low to high:  a.lo b.lo c.lo d.lo a.hi b.hi c.hi d.hi

    8 bits: words 2j (column n) and 2j + 1 (column n + 8), bytes low to high:  k0, k0+8, k0+1, k0+9

(The layout is the one that vLLM's and SGLang's Marlin kernels read; reproduced from its description alone and
checked against tensors made by vLLM's reference functions, `tests/golden`.)
"""

import torch

from .errors import LayoutError

TILE_K = 16
TILE_N = 64
BITS = (4, 8)
NIBBLES = 0x0F0F0F0F
"""The low nibble of every byte."""


def pack_qweight(weight_packed: torch.Tensor, *, bits: int) -> torch.Tensor:
    """Marlin `qweight` of a checkpoint's packed words.

    Args:
        weight_packed: int32 [..., N, K*bits/32], any strides; values unsigned, low bits first along K.
        bits: 4 or 8.

    Returns:
        int32 [..., K/16, N*bits/2], contiguous.

    Raises:
        LayoutError: K is not a multiple of 16, N not of 64, or the dtype is not int32.
    """
    n, k = check_packed_shape(weight_packed, bits=bits)
    words = weight_packed.reshape(-1, n // 64, 4, 2, 8, k // 16, bits // 2)  # [B, c, j, h, q, r, word]
    words = words.permute(6, 0, 5, 1, 4, 2, 3).contiguous()  # [word, B, r, c, q, j, h]
    out = torch.empty((*words.shape[1:5], 4, 4, bits // 4), dtype=torch.int32, device=words.device)
    if bits == 4:
        low, high = words & NIBBLES, (words >> 4) & NIBBLES
        even, odd = low[0] | (low[1] << 4), high[0] | (high[1] << 4)  # byte m: k0 and k0+8; k0+1 and k0+9
        for m in range(4):
            fields = (even[..., 0], even[..., 1], odd[..., 0], odd[..., 1])
            out[..., m, :, 0] = _join_bytes(*(field >> (8 * m) for field in fields))
    else:
        for m in range(4):
            first, second = words[m // 2], words[2 + m // 2]  # the words of k0 and of k0 + 8
            at = 16 * (m % 2)
            out[..., m, :, :] = _join_bytes(first >> at, second >> at, first >> (at + 8), second >> (at + 8))
    return out.view(*weight_packed.shape[:-2], k // 16, n * bits // 2)  # [B, r, c, q, m, j, word]


def unpack_qweight(qweight: torch.Tensor, *, bits: int) -> torch.Tensor:
    """The checkpoint's packed words of a Marlin `qweight`: the inverse of `pack_qweight`.

    Args:
        qweight: int32 [..., K/16, N*bits/2].
        bits: 4 or 8.

    Returns:
        int32 [..., N, K*bits/32], contiguous.
    """
    n, k = check_qweight_shape(qweight, bits=bits)
    packed = qweight.reshape(-1, k // 16, n // 64, 8, 4, 4, bits // 4)  # [B, r, c, q, m, j, word]
    lanes = packed.permute(4, 0, 2, 5, 6, 3, 1).contiguous()  # [m, B, c, j, word, q, r]
    if bits == 4:
        byte = [_join_bytes(*(lanes[m] >> (8 * i) for m in range(4))) for i in range(4)]  # [B, c, j, 1, q, r]
        even, odd = torch.cat(byte[:2], dim=3), torch.cat(byte[2:], dim=3)  # [B, c, j, h, q, r]
        first = (even & NIBBLES) | ((odd & NIBBLES) << 4)
        second = ((even >> 4) & NIBBLES) | (odd & ~NIBBLES)
        words = torch.stack((first, second), dim=-1)
    else:
        pairs = [(lanes[m], lanes[m + 1]) for m in (0, 2)]  # m and m + 1 share their two words
        low = [_join_bytes(a, a >> 16, b, b >> 16) for a, b in pairs]
        high = [_join_bytes(a >> 8, a >> 24, b >> 8, b >> 24) for a, b in pairs]
        words = torch.stack((*low, *high), dim=-1)
    return words.view(*qweight.shape[:-2], n, k * bits // 32)  # [B, c, j, h, q, r, word]


def _join_bytes(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, d: torch.Tensor) -> torch.Tensor:
    """Words of the lowest bytes of four tensors, the first lowest."""
    return (a & 255) | ((b & 255) << 8) | ((c & 255) << 16) | (d << 24)


def permute_scales(weight_scale: torch.Tensor) -> torch.Tensor:
    """Marlin scales [..., G, N] of a checkpoint's [..., N, G]; the order depends on G alone.

    G > 1, per 64 columns: position 8i + j holds column i + 8j
    G = 1, per 32 columns: position 8i + 2a + b holds column 8a + 2i + b
    """
    check_columns(weight_scale.shape[-2], "weight_scale")
    return order_columns(weight_scale.transpose(-1, -2), grouped=weight_scale.shape[-1] > 1)


def unpermute_scales(scales: torch.Tensor) -> torch.Tensor:
    """The checkpoint's scales [..., N, G] of Marlin's [..., G, N]: the inverse of `permute_scales`."""
    columns = restore_columns(scales, grouped=scales.shape[-2] > 1)
    return columns.transpose(-1, -2).contiguous()


def permute_bias(bias: torch.Tensor) -> torch.Tensor:
    """Marlin bias [..., N] of a bias in column order: always the order of scales with one group."""
    check_columns(bias.shape[-1], "bias")
    return order_columns(bias, grouped=False)


def unpermute_bias(bias: torch.Tensor) -> torch.Tensor:
    """A bias in column order of Marlin's: the inverse of `permute_bias`."""
    return restore_columns(bias, grouped=False)


def pack_zero_points(weight_zero_point: torch.Tensor, *, bits: int) -> torch.Tensor:
    """Marlin zero points of a checkpoint's.

    Args:
        weight_zero_point: int32 [..., N*bits/32, G]: packed along N, low bits first, not interleaved.
        bits: 4 or 8.

    Returns:
        int32 [..., G, N*bits/32]: columns in the order of grouped scales, then within 8 (4 for 8 bits) values
        the even ones before the odd ones, packed low to high.
    """
    values = unpack_fields(weight_zero_point.transpose(-1, -2), bits=bits)  # [..., G, N]
    check_columns(values.shape[-1], "weight_zero_point")
    ordered = order_columns(values, grouped=True)
    pairs = ordered.unflatten(-1, (-1, 16 // bits, 2))
    return pack_fields(pairs.transpose(-1, -2).reshape(ordered.shape), bits=bits)


def unpack_zero_points(zero_points: torch.Tensor, *, bits: int) -> torch.Tensor:
    """The checkpoint's zero points int32 [..., N*bits/32, G] of Marlin's: `pack_zero_points` undone."""
    return pack_fields(zero_point_values(zero_points, bits=bits), bits=bits).transpose(-1, -2).contiguous()


def zero_point_values(zero_points: torch.Tensor, *, bits: int) -> torch.Tensor:
    """Unsigned zero points int32 [..., G, N] in column order of Marlin's packed ones."""
    values = unpack_fields(zero_points, bits=bits)  # [..., G, N]
    pairs = values.unflatten(-1, (-1, 2, 16 // bits))
    return restore_columns(pairs.transpose(-1, -2).reshape(values.shape), grouped=True)


def unpack_fields(words: torch.Tensor, *, bits: int) -> torch.Tensor:
    """Unsigned fields int32 [..., W*32/bits] of int32 words [..., W], low bits first."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=words.device)
    fields: torch.Tensor = (words.unsqueeze(-1) >> shifts) & (2**bits - 1)
    return fields.flatten(-2)


def pack_fields(fields: torch.Tensor, *, bits: int) -> torch.Tensor:
    """int32 words [..., W] of unsigned fields [..., W*32/bits], low bits first."""
    per_word = 32 // bits
    grouped = fields.unflatten(-1, (-1, per_word)).to(torch.int32)
    words = torch.zeros(grouped.shape[:-1], dtype=torch.int32, device=fields.device)
    for position in range(per_word):
        words |= grouped[..., position] << (bits * position)
    return words


def order_columns(columns: torch.Tensor, *, grouped: bool) -> torch.Tensor:
    """[..., N] from column order into the order of grouped or single scales, as a new tensor."""
    split: torch.Tensor = columns.unflatten(-1, (-1, 8, 8) if grouped else (-1, 4, 4, 2))
    ordered = split.transpose(-1, -2) if grouped else split.transpose(-2, -3)
    return ordered.reshape(columns.shape)


def restore_columns(ordered: torch.Tensor, *, grouped: bool) -> torch.Tensor:
    """[..., N] back into column order: both orders are transpositions, so each is its own inverse."""
    return order_columns(ordered, grouped=grouped)


def check_packed_shape(weight_packed: torch.Tensor, *, bits: int) -> tuple[int, int]:
    """(N, K) of a checkpoint's packed words; raises LayoutError where the layout has no place for them."""
    check_words(weight_packed, "weight_packed", bits=bits)
    n, k = weight_packed.shape[-2], weight_packed.shape[-1] * 32 // bits
    return check_tile(n, k, "weight_packed")


def check_qweight_shape(qweight: torch.Tensor, *, bits: int) -> tuple[int, int]:
    """(N, K) of a Marlin `qweight`; raises LayoutError for a shape that no matrix has."""
    check_words(qweight, "qweight", bits=bits)
    n, k = -(-qweight.shape[-1] * 2 // bits), qweight.shape[-2] * TILE_K
    return check_tile(n, k, "qweight")


def check_words(words: torch.Tensor, name: str, *, bits: int) -> None:
    """Raise LayoutError unless `words` is int32 with at least two dimensions and `bits` is 4 or 8."""
    if bits not in BITS:
        raise LayoutError(f"{name}: expected bits to be 4 or 8, which Marlin has, got {bits}.")
    if words.dtype != torch.int32 or words.dim() < 2:
        raise LayoutError(
            f"{name}: expected int32 words in at least two dimensions, "
            f"got {words.dtype} {tuple(words.shape)}."
        )


def check_tile(n: int, k: int, name: str) -> tuple[int, int]:
    """(N, K), or a LayoutError that says by how much a matrix misses Marlin's tile."""
    if n % TILE_N or k % TILE_K or n == 0 or k == 0:
        raise LayoutError(
            f"{name}: expected N to be a multiple of {TILE_N} and K of {TILE_K}, because a Marlin tile is "
            f"{TILE_K} x {TILE_N}, got N={n}, K={k}. Pad the intermediate size first (stage `pad`)."
        )
    return n, k


def check_columns(n: int, name: str) -> None:
    """Raise LayoutError unless N is a positive multiple of 64."""
    if n % TILE_N or n == 0:
        raise LayoutError(
            f"{name}: expected N to be a multiple of {TILE_N}, because Marlin orders columns by {TILE_N}, "
            f"got {n}."
        )
