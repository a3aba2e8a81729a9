"""act-order: columns of K sorted by group, so that each group lies together, exactly.

    g_idx        2 0 1 0 2 1          group of each source column
    order        1 3 | 2 5 | 0 4      stable argsort: the source column at each position

w13's own order is kept as `w13_sort_order` (the op gathers tokens through it). w2's is folded into w13's
output columns (gate and up alike), so it costs nothing at run time; it is kept as `intermediate_order`. It
comes before `shard`: a TP rank then takes a plain slice of sorted columns.
"""

import torch

from ...kernels.layout import pack_fields, unpack_fields
from ..stage import both, stage
from ..states import Context, State


@stage(
    reads=both("weight_packed", "weight_scale"),
    reads_optional=both("weight_zero_point", "weight_g_idx", "weight_bias"),
    writes=both("weight_packed", "weight_scale"),
    writes_optional=(*both("weight_zero_point", "weight_bias"), "w13_sort_order", "intermediate_order"),
    drops=both("weight_g_idx"),
)
def order(state: State, context: Context) -> State:
    """Sort K by group where the scheme is act-order; check that g_idx is the plain one where it is not."""
    facts = state.facts
    first = _sort_order(state, "w13", facts.hidden_size, context)
    second = _sort_order(state, "w2", facts.intermediate_size, context)
    state = state.evolve(drop=both("weight_g_idx"))
    if first is not None:
        packed = _gather_inputs(state["w13_weight_packed"], first, bits=facts.w13.bits)
        state = state.evolve(w13_weight_packed=packed, w13_sort_order=first.to(torch.int32))
    if second is not None:
        packed = _gather_inputs(state["w2_weight_packed"], second, bits=facts.w2.bits)
        state = _gather_outputs(state.evolve(w2_weight_packed=packed), second)
        state = state.evolve(intermediate_order=second.to(torch.int32))
    return state


def _sort_order(state: State, matrix: str, size_k: int, context: Context) -> torch.Tensor | None:
    """int64 [B, K]: the source column at each sorted position, or None where K is in order."""
    facts = state.facts.w13 if matrix == "w13" else state.facts.w2
    g_idx = state.get(f"{matrix}_weight_g_idx")  # [B, R, K]
    if g_idx is None:
        return None
    if g_idx.device.type == "meta":
        return g_idx[:, 0].long() if facts.act_order else None
    group_size = facts.group_size or size_k
    plain = torch.arange(size_k, device=g_idx.device) // group_size
    for i, projection in torch.nonzero((g_idx.sort(2).values != plain).any(2)).tolist():
        context.problems.append(
            _unequal_groups(state, matrix, i, projection, g_idx[i, projection], group_size)
        )
    if not facts.act_order:
        for i in torch.nonzero((g_idx != plain).any(2).any(1)).flatten().tolist():
            context.problems.append(
                f"{_name(state, matrix, i)}: expected g_idx[k] = k div {group_size}, because the config "
                "declares no grouped act-order (actorder, desc_act), got another order. Correct that "
                "setting, or the config is of another checkpoint."
            )
        return None
    for i in torch.nonzero((g_idx != g_idx[:, :1]).any(2).any(1)).flatten().tolist():
        context.problems.append(
            f"{_name(state, matrix, i)}: expected gate and up to share their order, because one gather of "
            "tokens serves both, got different g_idx. Marlin cannot run it."
        )
    return torch.argsort(g_idx[:, 0], dim=1, stable=True)


def _unequal_groups(
    state: State, matrix: str, i: int, projection: int, g_idx: torch.Tensor, group_size: int
) -> str:
    groups = g_idx.numel() // group_size
    low, high = int(g_idx.min()), int(g_idx.max())
    which = ("gate", "up")[projection] if matrix == "w13" else "down"
    if low < 0 or high >= groups:
        found = f"values from {low} to {high}"
    else:
        counts = torch.bincount(g_idx.long(), minlength=groups)
        found = f"groups of {int(counts.min())} to {int(counts.max())} columns"
    return (
        f"{_name(state, matrix, i)} ({which}): expected g_idx to name each of {groups} groups {group_size} "
        f"times, because Marlin's groups are of one size, got {found}. Calibration never reached this "
        "expert, or the file is altered."
    )


def _name(state: State, matrix: str, i: int) -> str:
    return f"{state.facts.module}.{state.experts[i]}.{matrix} g_idx"


def _gather_inputs(weight_packed: torch.Tensor, source: torch.Tensor, *, bits: int) -> torch.Tensor:
    """[B, N, K*bits/32] with the columns of K taken from `source` [B, K]; fields are bytes meanwhile."""
    size_k = source.shape[1]
    fields = weight_packed.contiguous().view(torch.uint8)  # [B, N, K*bits/8, to a whole word]
    if bits == 4:
        fields = torch.stack((fields & 0x0F, fields >> 4), dim=-1).flatten(-2)
    index = source[:, None, :].expand(-1, fields.shape[1], -1)
    taken = fields[..., :size_k].gather(2, index)  # [B, N, K]
    if size_k < fields.shape[2]:
        taken = torch.nn.functional.pad(taken, (0, fields.shape[2] - size_k))
    if bits == 4:
        pairs = taken.unflatten(-1, (-1, 2))
        taken = pairs[..., 0] | (pairs[..., 1] << 4)
    return taken.view(torch.int32)  # [B, N, K*bits/32]


def _gather_outputs(state: State, source: torch.Tensor) -> State:
    """w13 with the output columns of each half taken from `source` [B, I]."""
    facts = state.facts
    size = facts.intermediate_size
    starts = torch.arange(facts.halves, device=source.device)[None, :, None] * size
    rows = (source[:, None, :] + starts).flatten(1)  # [B, R*I]

    def take(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.gather(
            1, rows.view(*rows.shape, *[1] * (tensor.dim() - 2)).expand(-1, -1, *tensor.shape[2:])
        )

    written = {
        f"w13_{field}": take(state[f"w13_{field}"])
        for field in ("weight_packed", "weight_scale", "weight_bias")
        if state.get(f"w13_{field}") is not None
    }
    zeros = state.get("w13_weight_zero_point")  # [B, R*I*bits/32, G]
    if zeros is not None:
        bits = facts.w13.bits
        words = unpack_fields(
            zeros.view(len(zeros), facts.halves, -1, zeros.shape[2]).transpose(2, 3), bits=bits
        )
        values = words[..., :size].transpose(2, 3).flatten(1, 2)  # [B, R*I, G]
        taken = take(values).view(len(zeros), facts.halves, size, -1).transpose(2, 3)
        padded = torch.nn.functional.pad(taken, (0, words.shape[3] - size))
        written["w13_weight_zero_point"] = pack_fields(padded, bits=bits).transpose(2, 3).flatten(1, 2)
    return state.evolve(written)
