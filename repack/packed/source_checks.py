"""What only the source can show and the layout would lose: a stage of offline repacking, behind `gather`.

Packed words whose last fields no weight owns (K of `weight_packed`, N of `weight_zero_point` not a multiple
of a word) are written as zeros by every known tool. The layout has no place for other bits, and `unpack`
could not give them back, so they are an error. So are biases that the dtype of the scales, which they are
packed in, does not hold exactly. Projections whose scales are all zero are noted, where they are accepted.
"""

import torch

from ...kernels.layout import unpack_fields
from ..pipeline import Stage, State, both
from ..states import Context, dtype_name


def source_checks(dead_projections: list[str]) -> Stage:
    """The stage; it adds the names of dead projections to the list."""

    def check_source(state: State, context: Context) -> State:
        if context.device.type != "meta":
            _check_padding(state, context)
            _check_biases(state, context)
            dead_projections.extend(_dead(state))
        return state

    return Stage(
        name="source_checks",
        function=check_source,
        reads=both("weight_packed", "weight_scale"),
        reads_optional=both("weight_zero_point", "weight_bias"),
        after=("gather",),
    )


def _check_padding(state: State, context: Context) -> None:
    facts = state.facts
    for matrix, owner, size_n, size_k in (
        ("w13", facts.w13, facts.intermediate_size, facts.hidden_size),
        ("w2", facts.w2, facts.hidden_size, facts.intermediate_size),
    ):
        words = {f"{matrix}_weight_packed": (state[f"{matrix}_weight_packed"], size_k)}
        zeros = state.get(f"{matrix}_weight_zero_point")  # [B, R*words, G]
        if zeros is not None:
            halves = zeros.reshape(len(zeros), facts.halves if matrix == "w13" else 1, -1, zeros.shape[2])
            words[f"{matrix}_weight_zero_point"] = (halves.transpose(2, 3), size_n)
        for name, (packed, size) in words.items():
            owned = size % (32 // owner.bits)
            if owned == 0:
                continue
            spare = unpack_fields(packed[..., -1:], bits=owner.bits)[..., owned:]
            for i in torch.nonzero(spare.flatten(1).any(1)).flatten().tolist():
                context.problems.append(
                    f"{facts.module}.{state.experts[i]} {name}: expected zeros in the {spare.shape[-1]} "
                    f"fields of the last word that no weight owns ({size} x {owner.bits} bits), because "
                    "the Marlin layout has no place for them and unpack could not restore them, got other "
                    "bits. Load it unpacked, or requantize it."
                )


def _check_biases(state: State, context: Context) -> None:
    scales = state.facts.scales_dtype
    for matrix in ("w13", "w2"):
        bias = state.get(f"{matrix}_weight_bias")  # [B, R*N]
        if bias is None or bias.dtype == scales:
            continue
        lost = bias.to(scales).to(bias.dtype) != bias
        for i in torch.nonzero(lost.any(1)).flatten().tolist():
            context.problems.append(
                f"{state.facts.module}.{state.experts[i]} {matrix} bias: expected values that "
                f"{dtype_name(scales)}, the dtype of the scales, holds exactly, because biases are packed in "
                f"it, got {int(lost[i].sum())} of {dtype_name(bias.dtype)} that it does not. Load it "
                "unpacked, or convert the biases first."
            )


def _dead(state: State) -> list[str]:
    """`<expert>.<role>` of projections whose scales are all zero."""
    found = []
    for matrix, roles in (("w13", ("gate", "up")[-state.facts.halves :]), ("w2", ("down",))):
        scales = state[f"{matrix}_weight_scale"]  # [B, R*N, G]
        scales = scales.reshape(len(scales), len(roles), -1)  # [B, R, N*G]
        for i, j in torch.nonzero((scales == 0).all(2)).tolist():
            found.append(f"{state.experts[i]}.{roles[j]}")
    return found
