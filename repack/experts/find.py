"""Where the routed experts of a checkpoint are: found by their tensors, not by the model's type.

A module of numbered experts has children `<number>.<projection>.<field>` with a known triple of projections
(`spellings`), whatever stands before: `model.layers.3.mlp.experts`, `…block_sparse_moe.experts`,
`language_model.…feed_forward.experts`. A module of fused experts has 3-D tensors instead (`fused`), and is
seen as if its experts were numbered.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ..errors import ExpertsError, report
from .fused import FusedLayout, HasShape, fused_layout, split_key
from .spellings import NUMBERED, Spelling

NUMBERED_KEY = re.compile(
    r"(?:(?P<module>.+)\.)?(?P<expert>\d{1,6})\.(?P<projection>[^.]+)\.(?P<field>[^.]+)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsModule:
    """A module whose children are numbered experts.

    Attributes:
        name: the module's name in the checkpoint; "" for keys below the module itself.
        spelling: its projections' names.
        experts: the expert numbers seen, ascending.
        keys: every tensor key below the module, without the module's name: `7.gate_proj.weight_packed`.
        fields: the last parts of those keys: `weight_packed`, `weight_scale`, …
        fused: how the experts are stored where they are 3-D tensors; the keys are then views of them.
    """

    name: str
    spelling: Spelling
    experts: tuple[int, ...]
    keys: tuple[str, ...]
    fields: frozenset[str]
    fused: FusedLayout | None = None

    @property
    def quantized(self) -> bool:
        """Whether any projection has packed words, or what goes with them; plain weights are carried over."""
        return bool(self.fields & PACKED_FIELDS) or (
            "weight" not in self.fields and bool(self.fields & COMPANION_FIELDS)
        )

    @property
    def fewer_tensors(self) -> str:
        """A sentence about experts that have fewer tensors than others: likely the wrong ones; or nothing."""
        first: dict[str, str] = {}
        counts: Counter[str] = Counter()
        for key in self.keys:
            expert = key.partition(".")[0]
            first.setdefault(expert, key)
            counts[expert] += 1
        most = max(counts.values())
        few = [first[expert] for expert, number in counts.items() if number < most]
        more = f" and {len(few) - 6} more" if len(few) > 6 else ""
        return f" Fewer tensors than other experts have: {', '.join(few[:6])}{more}." if few else ""


VIEWED = NUMBERED[0]
"""The names under which fused experts are seen."""

PACKED_FIELDS = frozenset({"weight_packed", "qweight"})
COMPANION_FIELDS = frozenset(
    {"weight_scale", "weight_zero_point", "weight_g_idx", "weight_shape", "scales", "qzeros", "g_idx"}
)
"""What stands beside packed words: where it stands alone, they are missing."""


def find_experts(tensors: Iterable[str] | Mapping[str, HasShape]) -> dict[str, ExpertsModule]:
    """Every module of experts among a checkpoint's tensors, in natural order.

    Args:
        tensors: names, or names with shapes, without which fused experts are not seen.

    Raises:
        ExpertsError: a module called after experts whose projections are no known triple; it lists what was
            seen.
    """
    found: dict[str, list[re.Match[str]]] = {}
    for name in tensors:
        match = NUMBERED_KEY.fullmatch(name)
        if match:
            found.setdefault(match["module"] or "", []).append(match)
    modules = {}
    problems = []
    for module, matches in found.items():
        projections = {match["projection"] for match in matches}
        spelling = next((s for s in NUMBERED if set(s.projections) <= projections), None)
        if spelling is None:
            if is_called_experts(module) and PACKED_FIELDS & {match["field"] for match in matches}:
                names = [match.string for match in matches]
                problems.append(unknown_spelling(module, projections, names))
            continue
        start = len(module) + 1 if module else 0
        modules[module] = ExpertsModule(
            name=module,
            spelling=spelling,
            experts=tuple(sorted({int(match["expert"]) for match in matches})),
            keys=tuple(match.string[start:] for match in matches),
            fields=frozenset(match["field"] for match in matches),
        )
    if isinstance(tensors, Mapping):
        for module, fused in _find_fused(tensors, problems, numbered=modules).items():
            modules.setdefault(module, fused)
    if problems:
        raise ExpertsError(report("experts", problems))
    return dict(sorted(modules.items(), key=lambda item: natural(item[0])))


def _find_fused(
    tensors: Mapping[str, HasShape], problems: list[str], *, numbered: Iterable[str]
) -> dict[str, ExpertsModule]:
    """Modules with 3-D tensors of packed words; what is wrong with one is added to the problems."""
    candidates: set[str] = set()
    scaled: set[str] = set()
    for name, tensor in tensors.items():
        parent, _, last = name.rpartition(".")
        if len(tensor.shape) == 3 and last.endswith(("_packed", "_scale")):
            module = parent.rpartition(".")[0] if last.startswith("weight_") else parent
            (candidates if last.endswith("_packed") else scaled).add(module)
    problems += [
        text
        for module in sorted(scaled - candidates)
        if (text := _without_packed(module, tensors)) is not None
    ]
    found = {}
    for module in sorted(candidates):
        parent, _, number = module.rpartition(".")
        if number.isdigit() and parent in numbered:  # one expert's matrix of a wrong shape: `check` says so
            continue
        shapes = {key: tuple(tensors[f"{module}.{key}"].shape) for key in below(module, tensors)}
        own = {key: shape for key, shape in shapes.items() if split_key(key) is not None}
        try:
            layout = fused_layout(module, own)
        except ExpertsError as error:
            problems.append(str(error))
            continue
        if layout is not None:
            found[module] = fused_module(module, layout)
        else:  # 3-D packed words are experts, whatever the module is called
            seen = {split[0] for key in own if (split := split_key(key))}
            problems.append(unknown_spelling(module, seen, [f"{module}.{key}" for key in own]))
    return found


def _without_packed(module: str, tensors: Mapping[str, HasShape]) -> str | None:
    """What is wrong where an experts module has 3-D scales but no weights at all; plain weights are none."""
    keys = below(module, tensors)
    weights = [key for key in keys if split_key(key) is None and len(tensors[f"{module}.{key}"].shape) == 3]
    if weights or not is_called_experts(module):
        return None
    return (
        f"{module}: expected packed words (…_packed) beside {', '.join(keys)}, got none. A shard is missing; "
        "fetch the checkpoint again."
    )


def fused_module(name: str, layout: FusedLayout) -> ExpertsModule:
    """A module of fused experts, seen as numbered ones."""
    roles = {"gate": VIEWED.gate, "up": VIEWED.up, "down": VIEWED.down}
    stored = [(roles[role], tensor.field) for tensor in layout.tensors.values() for role in tensor.roles]
    experts = tuple(range(layout.num_experts))
    return ExpertsModule(
        name=name,
        spelling=VIEWED,
        experts=experts,
        keys=tuple(f"{e}.{projection}.{field}" for e in experts for projection, field in stored),
        fields=frozenset(field for _, field in stored),
        fused=layout,
    )


def is_called_experts(module: str) -> bool:
    """Whether a module's own name says that it holds routed experts."""
    return module.rpartition(".")[2] in {"experts", "expert", "routed_experts"}


def unknown_spelling(module: str, projections: Iterable[str], names: Sequence[str]) -> str:
    """The error of an experts module whose projections no table knows; `names` are its tensors."""
    known = "; ".join("/".join(s.projections) for s in NUMBERED)
    return (
        f"{module}: expected experts with the projections {known} (gate/up/down), got "
        f"{', '.join(sorted(projections))}. It has {len(names)} tensors, {names[0]} first. A projection is "
        "missing from the checkpoint, or the model spells them anew: then add the triple to "
        "repack/experts/spellings.py."
    )


def natural(name: str) -> list[tuple[int, int | str]]:
    """A sort key that puts layer 10 after layer 9."""
    return [(0, int(part)) if part.isdigit() else (1, part) for part in name.split(".")]


def below(module: str, tensors: Mapping[str, object]) -> list[str]:
    """Keys of `tensors` below a module, without its name."""
    prefix = f"{module}."
    return [name[len(prefix) :] for name in tensors if name.startswith(prefix)]
