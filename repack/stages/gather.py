"""per-expert tensors -> w13 = [gate; up] and w2 of a block, stacked, in checkpoint layout.

    expert 0 gate [I, H]  expert 0 up [I, H]        w13 [B, 2I, H]   expert 0: gate rows, up rows
    expert 1 gate [I, H]  expert 1 up [I, H]   ->                    expert 1: gate rows, up rows

All tensors of the block are read straight into their places, in the order in which they lie in the files.
This is the only stage that loops over experts.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ..quant_methods.method import Field
from ..quant_methods.table import METHODS
from ..scheme import WeightScheme
from ..stage import both, stage
from ..states import Context, ExpertTensors, State


@dataclass(frozen=True, slots=True, kw_only=True)
class Gathered:
    """One field of w13 or w2 of a block: [B, R, *shape], to be read."""

    matrix: str
    field: Field
    scheme: WeightScheme
    bits: int
    projections: tuple[str, ...]
    stacked: torch.Tensor


@stage(
    reads=("expert_tensors",),
    writes=both("weight_packed", "weight_scale"),
    writes_optional=both("weight_zero_point", "weight_g_idx", "weight_bias"),
    drops=("expert_tensors",),
    reads_files=True,
)
def gather(state: State, context: Context) -> State:
    """Read the block's tensors from `expert_tensors` and stack them, on the context's device."""
    experts: ExpertTensors = state["expert_tensors"]
    method = METHODS[context.scheme.quant_method]
    parts = list(_parts(state, context))
    if context.device.type != "meta":
        experts.read_all(
            (_key(expert, projection, part.field), part.stacked[i, j])
            for part in parts
            for i, expert in enumerate(state.experts)
            for j, projection in enumerate(part.projections)
        )
    written: dict[str, torch.Tensor] = {}
    for part in parts:
        becomes = part.field.becomes
        stacked = part.stacked.to(context.device, non_blocking=context.staging is not None)
        if becomes in ("weight_scale", "weight_bias") and stacked.device.type != "meta":
            _check_values(experts, part.field, stacked, state.experts, part.projections, context)
        canonical = method.canonical(str(becomes), stacked, part.scheme, bits=part.bits)
        side_by_side = canonical if becomes == "weight_g_idx" else canonical.flatten(1, 2)
        written[f"{part.matrix}_{becomes}"] = side_by_side
    return state.evolve(written, drop=("expert_tensors",))


def _parts(state: State, context: Context) -> Iterator[Gathered]:
    """The fields that the layer has, with memory to read them into."""
    experts: ExpertTensors = state["expert_tensors"]
    method = METHODS[context.scheme.quant_method]
    spelling, facts = experts.module.spelling, state.facts
    for matrix, projections, scheme, n, k in (
        ("w13", (spelling.gate, spelling.up), context.scheme.w13, facts.intermediate_size, facts.hidden_size),
        ("w2", (spelling.down,), context.scheme.w2, facts.hidden_size, facts.intermediate_size),
    ):
        for field in method.fields(scheme, size_n=n, size_k=k):
            first = _key(state.experts[0], projections[0], field)
            if field.becomes is None or first not in experts.shapes:
                continue
            yield Gathered(
                matrix=matrix,
                field=field,
                scheme=scheme,
                bits=facts.w13.bits if matrix == "w13" else facts.w2.bits,
                projections=projections,
                stacked=_empty(
                    (len(state.experts), len(projections), *field.shape),
                    experts.shapes[first][0],
                    experts,
                    context,
                ),
            )


def _empty(
    shape: tuple[int, ...], dtype: torch.dtype | None, experts: ExpertTensors, context: Context
) -> torch.Tensor:
    """Memory that the source can fill."""
    if context.staging is not None:
        return context.staging.empty(shape, dtype)
    fillable = context.device.type == "meta" or experts.source.fills_any_device
    return torch.empty(shape, dtype=dtype, device=context.device if fillable else "cpu")


def _check_values(
    experts: ExpertTensors,
    field: Field,
    stacked: torch.Tensor,
    block: range,
    projections: tuple[str, ...],
    context: Context,
) -> None:
    """Scales and biases must be finite, and a projection's scales not all zero."""
    values = stacked.flatten(2)  # [B, R, values]
    broken = (~torch.isfinite(values)).sum(2)
    may_be_zero = context.allow_dead_experts or field.becomes == "weight_bias"
    dead = torch.zeros_like(broken) if may_be_zero else (values == 0).all(2)
    for i, j in torch.nonzero((broken > 0) | dead.bool()).tolist():
        found = f"{int(broken[i, j])} NaN or Inf" if broken[i, j] else "nothing but zeros"
        accept = "" if broken[i, j] else ", or pass allow_dead_experts (--allow-dead-experts)"
        context.problems.append(
            f"{experts.label(_key(block[i], projections[j], field))}: expected finite values, not "
            f"all zero, got {found} among {values.shape[2]}. Calibration never reached this expert; quantize "
            f"again with more data{accept}."
        )


def _key(expert: int, projection: str, field: Field) -> str:
    return f"{expert}.{projection}.{field.name}"
