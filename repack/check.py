"""A layer's expert tensors against its scheme, from headers: nothing is inferred, all is checked."""

import warnings
from collections import Counter
from collections.abc import Iterator

import torch

from ..kernels.matrix import GROUP_SIZES
from .checkpoint import shorten
from .errors import ExpertsError, MarlinMoEWarning, report
from .quant_methods.method import INDEX_DTYPES, SCALE_DTYPES, Field, QuantMethod
from .quant_methods.table import METHODS
from .scheme import QuantScheme, WeightScheme
from .states import ExpertFacts, ExpertTensors, MatrixFacts, dtype_name

SCALE_FIELDS = ("weight_scale", "scales")
ORDER_FIELDS = ("weight_g_idx", "g_idx")


def expert_facts(experts: ExpertTensors, scheme: QuantScheme) -> ExpertFacts:
    """The facts of a layer whose tensors all fit its scheme.

    Raises:
        ExpertsError: experts or tensors missing or left over, shapes or dtypes that disagree with the
            scheme or with each other, sizes that the Marlin layout has no place for. All in one text.
    """
    method = METHODS[scheme.quant_method]
    missing = _missing_experts(experts)
    if missing:
        raise ExpertsError(missing)
    spelling = experts.module.spelling
    hidden, intermediate = _sizes(experts, scheme, method)
    problems = list(_tensor_problems(experts, scheme, method, hidden=hidden, intermediate=intermediate))
    problems += _layout_problems(experts.name, scheme, hidden=hidden, intermediate=intermediate)
    problems += _disagreements(experts)
    if problems:
        raise ExpertsError(report(experts.name, problems))
    return ExpertFacts(
        module=experts.name,
        num_experts=len(experts.module.experts),
        hidden_size=hidden,
        intermediate_size=intermediate,
        padded_intermediate_size=intermediate,
        gated=True,
        w13=_matrix_facts(experts, (spelling.gate, spelling.up), scheme.w13, method, hidden),
        w2=_matrix_facts(experts, (spelling.down,), scheme.w2, method, intermediate),
        scales_dtype=_scales_dtype(experts),
        biased=any(key.endswith(".bias") for key in experts.shapes),
    )


def _scales_dtype(experts: ExpertTensors) -> torch.dtype:
    """The dtype of all scales; `_disagreements` found them alike."""
    return next(
        dtype
        for key, (dtype, _) in experts.shapes.items()
        if key.endswith(SCALE_FIELDS) and dtype is not None
    )


def _matrix_facts(
    experts: ExpertTensors,
    projections: tuple[str, ...],
    scheme: WeightScheme,
    method: QuantMethod,
    size_k: int,
) -> MatrixFacts:
    group_size = scheme.group_size
    one_group = group_size is None or group_size >= size_k
    bits = method.effective_bits(experts, projections, scheme)
    if bits != scheme.bits:
        warnings.warn(
            f"{experts.name}: {', '.join(projections)} widened from {scheme.bits} to {bits} bits, "
            f"exactly, because a zero point is {2**scheme.bits}, which {scheme.bits} bits cannot hold.",
            MarlinMoEWarning,
            stacklevel=2,
        )
    return MatrixFacts(
        bits=bits,
        group_size=None if one_group else group_size,
        symmetric=scheme.symmetric,
        act_order=scheme.act_order and not one_group,
    )


def _missing_experts(experts: ExpertTensors) -> str | None:
    seen = experts.module.experts
    count = seen[-1] + 1 - len(seen)
    if not count:
        return None
    first = sorted(set(range(len(seen) + min(count, 6))) - set(seen))  # a number may be absurdly high
    more = f" and {count - len(first)} more" if count > len(first) else ""
    return (
        f"{experts.name}: expected experts 0 .. {seen[-1]} without a gap, got {len(seen)} experts without "
        f"{', '.join(map(str, first))}{more}. {_find_rest(experts)}"
        f"{experts.module.fewer_tensors}"
    )


def _find_rest(experts: ExpertTensors) -> str:
    """What to do where tensors are missing."""
    if experts.in_memory:
        return "Pass the tensors of all experts of the layer."
    return "A shard is missing; fetch it again."


def _sizes(experts: ExpertTensors, scheme: QuantScheme, method: QuantMethod) -> tuple[int, int]:
    """(H, I) that the packed words have room for: what most experts say, so that a wrong one is named.

    N of gate and up is I, N of down is H; K, which depends on bits, only decides where those are in doubt.
    """
    spelling = experts.module.spelling
    rows: dict[str, Counter[int]] = {"hidden": Counter(), "intermediate": Counter()}
    columns: dict[str, Counter[int]] = {"hidden": Counter(), "intermediate": Counter()}
    for projection, weights, n_is, k_is in (
        (spelling.gate, scheme.w13, "intermediate", "hidden"),
        (spelling.up, scheme.w13, "intermediate", "hidden"),
        (spelling.down, scheme.w2, "hidden", "intermediate"),
    ):
        for expert in experts.module.experts:
            key = f"{expert}.{projection}.{method.packed_field}"
            _, shape = experts.shapes.get(key, (None, ()))
            if len(shape) == 2 and 0 not in shape:
                n, k = method.sizes(shape, bits=weights.bits)
                rows[n_is][n] += 1
                columns[k_is][k] += 1
            elif key in experts.shapes:
                raise ExpertsError(
                    f"{experts.label(key)}: expected packed words in two dimensions, got {shape}."
                )
            elif expert == experts.module.experts[0] and projection != spelling.gate:
                raise ExpertsError(
                    f"{experts.label(key)}: expected a tensor, because every expert has one, got nothing. "
                    f"{_find_rest(experts)}"
                )
    hidden, intermediate = (
        max(rows[name], key=lambda size: (rows[name][size], columns[name][size]))
        for name in ("hidden", "intermediate")
    )
    return hidden, intermediate


def _tensor_problems(
    experts: ExpertTensors, scheme: QuantScheme, method: QuantMethod, *, hidden: int, intermediate: int
) -> Iterator[str]:
    spelling = experts.module.spelling
    plan = (
        (spelling.gate, scheme.w13, intermediate, hidden),
        (spelling.up, scheme.w13, intermediate, hidden),
        (spelling.down, scheme.w2, hidden, intermediate),
    )
    fields = {p: method.fields(weights, size_n=n, size_k=k) for p, weights, n, k in plan}
    sizes = {p: (n, k) for p, _, n, k in plan}
    where = {p: f"{weights} ({weights.where})" for p, weights, _, _ in plan}
    wanted: set[str] = set()
    missing: list[str] = []
    for projection, expected in fields.items():
        for field in expected:
            keys = [f"{expert}.{projection}.{field.name}" for expert in experts.module.experts]
            wanted.update(keys)
            present = [key for key in keys if key in experts.shapes]
            if field.required:
                missing += [key for key in keys if key not in experts.shapes]
            found = [
                _field_problem(experts, key, field, sizes[projection], where[projection]) for key in present
            ]
            wrong = [(key, problem) for key, problem in zip(present, found, strict=True) if problem]
            if wrong:
                others = shorten(_stored(experts, [key for key, _ in wrong[1:]], wrong[0][0]))
                yield wrong[0][1] + (f" Wrong too: {others}." if others else "")
    if missing:
        yield (
            f"{experts.name}: expected {len(missing)} tensors more, because every expert is "
            f"{where[spelling.gate]}, got none of {shorten(_stored(experts, missing))}. "
            f"{_find_rest(experts)} Or the config is of another checkpoint."
        )
    left_over = [key for key in experts.shapes if key not in wanted]
    if left_over:
        yield (
            f"{experts.name}: expected only the tensors of {where[spelling.gate]}, got {len(left_over)} that "
            f"nothing uses: {shorten(left_over)}. The config and the tensors disagree."
        )


def _field_problem(
    experts: ExpertTensors, key: str, field: Field, size: tuple[int, int], where: str
) -> str | None:
    dtype, shape = experts.shapes[key]
    n, k = size
    if shape != field.shape:
        return (
            f"{experts.label(key)}: expected {field.shape} because N={n}, K={k} and the weights are "
            f"{where}, got {shape}. The checkpoint and its config disagree.{_fitting_groups(field, shape, k)}"
        )
    if dtype not in field.dtypes:
        names = " or ".join(dtype_name(d) for d in field.dtypes)
        return (
            f"{experts.label(key)}: expected {names}, got {experts.dtype_name(key)}, although the weights "
            f"are {where}. The file is altered, or the config is of another checkpoint."
        )
    if field.name == "weight_shape" and tuple(found := experts.read(key).tolist()) != size:
        return (
            f"{experts.full_name(key)}: expected {[n, k]} as the packed words have, got {found}. One of them "
            "is of another checkpoint."
        )
    return None


def _fitting_groups(field: Field, shape: tuple[int, ...], size_k: int) -> str:
    """Which group size scales of another number of groups are for."""
    groups = set(shape) - set(field.shape)
    if field.becomes != "weight_scale" or len(shape) != 2 or len(groups) != 1:
        return ""
    size, rest = divmod(size_k, max(1, groups.pop()))
    return f" These scales fit group_size {size}." if size in GROUP_SIZES and not rest else ""


def _stored(experts: ExpertTensors, keys: list[str], but: str = "") -> list[str]:
    """Keys as the checkpoint has them, each once; without the one that holds `but`."""
    stored = dict.fromkeys(map(experts.stored_key, keys))
    stored.pop(experts.stored_key(but), None)
    return list(stored)


def _layout_problems(module: str, scheme: QuantScheme, *, hidden: int, intermediate: int) -> Iterator[str]:
    if hidden % 64:
        yield (
            f"{module}: expected a hidden size that is a multiple of 64, Marlin's tile, got {hidden}. Only "
            "the intermediate size can be padded."
        )
    for name, weights, k in (("w13", scheme.w13, hidden), ("w2", scheme.w2, intermediate)):
        size = weights.group_size
        if size is not None and k > size and k % size:
            yield (
                f"{module}.{name}: expected groups x group_size = K, got K={k} and group_size {size} "
                f"({weights.where}). The last group would be cut; Marlin cannot run it."
            )


def _disagreements(experts: ExpertTensors) -> Iterator[str]:
    """What each tensor alone may be, but all of a layer must share: they are stacked into one."""
    spelling, count = experts.module.spelling, len(experts.module.experts)
    found: dict[str, dict[str, torch.dtype | None]] = {}
    for key, (dtype, _) in experts.shapes.items():
        found.setdefault(key.rpartition(".")[2], {})[key] = dtype
    for fields, allowed in (((*SCALE_FIELDS, "bias"), SCALE_DTYPES), (ORDER_FIELDS, INDEX_DTYPES)):
        for field in fields:
            holders_of: dict[torch.dtype, list[str]] = {}
            for key, dtype in found.get(field, {}).items():
                if dtype is not None and dtype in allowed:
                    holders_of.setdefault(dtype, []).append(key)
            if len(holders_of) > 1:
                listed = (
                    f"{dtype_name(dtype)} ({shorten(_stored(experts, keys), 3)})"
                    for dtype, keys in sorted(holders_of.items(), key=lambda item: len(item[1]))
                )
                yield (
                    f"{experts.name}: expected {field} of one dtype in all its projections, because they are "
                    f"stacked, got {' and '.join(listed)}. One of them is of another checkpoint."
                )
    for field, projections in (
        ("bias", spelling.projections),
        *((field, (spelling.gate, spelling.up)) for field in ORDER_FIELDS),
        *((field, (spelling.down,)) for field in ORDER_FIELDS),
    ):
        holders = [key for key in found.get(field, {}) if key.split(".")[1:2] in [[p] for p in projections]]
        every = [f"{e}.{projection}.{field}" for e in experts.module.experts for projection in projections]
        if holders and len(holders) != len(every):
            absent = _stored(experts, [key for key in every if key not in experts.shapes])
            yield (
                f"{experts.name}: expected {field} on all {len(every)} projections "
                f"({', '.join(projections)} of {count} experts; it is missing on {shorten(absent)}) or on "
                f"none, got it on {len(holders)}."
            )
