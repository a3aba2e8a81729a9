"""per-expert tensors -> w13 = [gate; up] and w2 of a block, stacked, in checkpoint layout.

    expert 0 gate [I, H]  expert 0 up [I, H]        w13 [B, 2I, H]   expert 0: gate rows, up rows
    expert 1 gate [I, H]  expert 1 up [I, H]   ->                    expert 1: gate rows, up rows

Every tensor is read straight into its place. This is the only stage that loops over experts.
"""

import torch

from ..quant_methods.method import Field
from ..quant_methods.table import METHODS
from ..stage import both, stage
from ..states import Context, ExpertTensors, State


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
    spelling, facts = experts.module.spelling, state.facts
    written: dict[str, torch.Tensor] = {}
    for matrix, projections, scheme, n, k in (
        ("w13", (spelling.gate, spelling.up), context.scheme.w13, facts.intermediate_size, facts.hidden_size),
        ("w2", (spelling.down,), context.scheme.w2, facts.hidden_size, facts.intermediate_size),
    ):
        bits = facts.w13.bits if matrix == "w13" else facts.w2.bits
        for field in method.fields(scheme, size_n=n, size_k=k):
            if field.becomes is None or _key(state.experts[0], projections[0], field) not in experts.shapes:
                continue
            stacked = _stack(experts, field, state.experts, projections, context)
            if field.becomes in ("weight_scale", "weight_bias") and stacked.device.type != "meta":
                _check_values(experts, field, stacked, state.experts, projections, context)
            canonical = method.canonical(field.becomes, stacked, scheme, bits=bits)
            side_by_side = canonical if field.becomes == "weight_g_idx" else canonical.flatten(1, 2)
            written[f"{matrix}_{field.becomes}"] = side_by_side
    return state.evolve(written, drop=("expert_tensors",))


def _stack(
    experts: ExpertTensors, field: Field, block: range, projections: tuple[str, ...], context: Context
) -> torch.Tensor:
    """[B, R, *shape] of one field, each tensor read into its place."""
    dtype, _ = experts.shapes[_key(block[0], projections[0], field)]
    shape = (len(block), len(projections), *field.shape)
    if context.device.type == "meta":
        return torch.empty(shape, dtype=dtype, device="meta")
    staging = context.staging
    if staging is not None:
        stacked = staging.empty(shape, dtype)
    else:
        device = context.device if experts.source.fills_any_device else torch.device("cpu")
        stacked = torch.empty(shape, dtype=dtype, device=device)
    for i, expert in enumerate(block):
        for j, projection in enumerate(projections):
            experts.read_into(_key(expert, projection, field), stacked[i, j])
    return stacked.to(context.device, non_blocking=staging is not None)


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
