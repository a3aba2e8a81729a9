"""This rank's slice of the unpadded intermediate size: w13 by columns (each half), w2 by rows.

    I = 256, TP 2, rank 1        w13 [gate 0..255; up 0..255] -> [gate 128..255; up 128..255]
                                 w2 rows 0..255               -> rows 128..255

Experts of other EP ranks are never gathered. A matrix with one group along K keeps it on every rank. A slice
that cuts a group is regrouped, exactly: to the larger of 64 and 32 that divides both slice and group, by
repeating scales and zero points.

    group_size 128, slice 192..383        source groups  | 128: s1 | 256: s2 |
    regrouped to 64                                        s1   s2   s2          (192.., 256.., 320..)
"""

from dataclasses import replace

import torch

from ...kernels.layer import Shard
from ...kernels.layout import pack_fields, unpack_fields
from ..errors import ShardError
from ..stage import both, stage
from ..states import Context, ExpertFacts, State

REGROUPED = (64, 32)


@stage(
    reads=both("weight_packed", "weight_scale"),
    reads_optional=(*both("weight_zero_point", "weight_bias"), "intermediate_order"),
    writes=both("weight_packed", "weight_scale"),
    writes_optional=(*both("weight_zero_point", "weight_bias"), "intermediate_order"),
    after=("order",),
)
def shard(state: State, context: Context) -> State:
    """Slice w13's columns and w2's rows for the context's TP rank."""
    facts, tp = state.facts, context.tp
    group_size = sliced_group_size(facts, tp)
    start, stop = tp.bounds(facts.intermediate_size)
    written = {f"w13_{name}": tensor for name, tensor in _slice_w13(state, start, stop).items()}
    written |= {
        f"w2_{name}": tensor for name, tensor in _slice_w2(state, start, stop, group_size, tp).items()
    }
    intermediate_order = state.get("intermediate_order")
    if intermediate_order is not None:
        written["intermediate_order"] = intermediate_order[:, start:stop].contiguous()
    sliced = replace(
        facts,
        intermediate_size=stop - start,
        padded_intermediate_size=stop - start,
        w2=replace(facts.w2, group_size=group_size),
    )
    return state.evolve(written, facts=sliced)


def sliced_group_size(facts: ExpertFacts, tp: Shard) -> int | None:
    """w2's group size on each of `tp.size` ranks: the source's, or the one that a cut group is regrouped to.

    Raises:
        ShardError: I is not divisible, or no group size that Marlin has fits; it names the sizes that work.
    """
    if fits(facts, tp.size):
        return _group_size(facts, tp.size)
    size, group = facts.intermediate_size, facts.w2.group_size
    works = [str(n) for n in range(1, size + 1) if fits(facts, n) and n <= 64]
    reason = (
        f"it is not divisible by {tp.size}"
        if size % tp.size
        else f"a slice of {size // tp.size} cuts groups of {group} and is no multiple of 64 or 32"
    )
    raise ShardError(
        f"{facts.module}: expected the intermediate size {size} to split over tp={tp.size}, got that "
        f"{reason}. TP sizes that work: {', '.join(works)}. "
        f"EP splits whole experts: up to {facts.num_experts}."
    )


def fits(facts: ExpertFacts, tp_size: int) -> bool:
    """Whether the intermediate size splits over `tp_size` ranks, with groups kept or regrouped."""
    if facts.intermediate_size % tp_size:
        return False
    return facts.w2.group_size is None or _group_size(facts, tp_size) is not None


def _group_size(facts: ExpertFacts, tp_size: int) -> int | None:
    group, length = facts.w2.group_size, facts.intermediate_size // tp_size
    if group is None or length % group == 0:
        return group
    return next((size for size in REGROUPED if length % size == 0 and group % size == 0), None)


def _slice_w13(state: State, start: int, stop: int) -> dict[str, torch.Tensor]:
    halves = state.facts.halves
    written = {}
    for name in ("weight_packed", "weight_scale", "weight_bias"):
        tensor = state.get(f"w13_{name}")  # [B, R*I, …]
        if tensor is not None:
            rows = tensor.unflatten(1, (halves, -1))[:, :, start:stop]
            written[name] = rows.flatten(1, 2)
    zeros = state.get("w13_weight_zero_point")  # [B, R*words, G]
    if zeros is not None:
        words = zeros.unflatten(1, (halves, -1)).transpose(2, 3)  # [B, R, G, words]
        sliced = slice_fields(words, start, stop, bits=state.facts.w13.bits)
        written["weight_zero_point"] = sliced.transpose(2, 3).flatten(1, 2)
    return written


def _slice_w2(
    state: State, start: int, stop: int, group_size: int | None, tp: Shard
) -> dict[str, torch.Tensor]:
    facts = state.facts
    written = {"weight_packed": slice_fields(state["w2_weight_packed"], start, stop, bits=facts.w2.bits)}
    for name in ("weight_scale", "weight_zero_point"):
        tensor = state.get(f"w2_{name}")  # [B, H or words, G]
        if tensor is not None:
            written[name] = _slice_groups(tensor, start, stop, facts.w2.group_size, group_size)
    bias = state.get("w2_weight_bias")
    if bias is not None:
        written["weight_bias"] = bias if tp.rank == 0 else torch.zeros_like(bias)  # added once, by rank 0
    return written


def _slice_groups(
    tensor: torch.Tensor, start: int, stop: int, source: int | None, group_size: int | None
) -> torch.Tensor:
    """[..., G] -> the groups of [start, stop), each source group repeated where it was cut."""
    if source is None or group_size is None:
        return tensor
    groups = [first // source for first in range(start, stop, group_size)]
    return tensor.index_select(tensor.dim() - 1, torch.tensor(groups, device=tensor.device))


def slice_fields(words: torch.Tensor, start: int, stop: int, *, bits: int) -> torch.Tensor:
    """Fields [start, stop) of packed words [..., W]; the last word is filled with zeros.

    A cut at whole words is a view; elsewhere the fields are unpacked and packed again.
    """
    per_word = 32 // bits
    if start % per_word == 0 and stop % per_word == 0:
        return words[..., start // per_word : stop // per_word]
    fields = unpack_fields(words[..., start // per_word : -(-stop // per_word)], bits=bits)
    offset = start % per_word
    taken = fields[..., offset : offset + stop - start]
    return pack_fields(torch.nn.functional.pad(taken, (0, -taken.shape[-1] % per_word)), bits=bits)
