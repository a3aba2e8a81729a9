"""Where the routed experts of a checkpoint are: found by their tensors, not by the model's type.

A module of numbered experts has children `<number>.<projection>.<field>` with a known triple of projections
(`spellings`), whatever stands before: `model.layers.3.mlp.experts`, `…block_sparse_moe.experts`,
`language_model.…feed_forward.experts`. A module of fused experts has 3-D tensors instead (`fused`), and is
seen as if its experts were numbered.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ..errors import ExpertsError, report
from .fused import FusedLayout, HasShape, fused_layout, split_key
from .spellings import NUMBERED, Spelling

NUMBERED_KEY = re.compile(r"(?:(?P<module>.+)\.)?(?P<expert>\d+)\.(?P<projection>[^.]+)\.(?P<field>[^.]+)")


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
        """Whether any projection has packed words; plain weights are carried over untouched."""
        return bool(self.fields & PACKED_FIELDS)


VIEWED = NUMBERED[0]
"""The names under which fused experts are seen."""

PACKED_FIELDS = frozenset({"weight_packed", "qweight"})


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
                problems.append(unknown_spelling(module, projections))
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
        for module, fused in _find_fused(tensors, problems).items():
            modules.setdefault(module, fused)
    if problems:
        raise ExpertsError(report("experts", problems))
    return dict(sorted(modules.items(), key=lambda item: natural(item[0])))


def _find_fused(tensors: Mapping[str, HasShape], problems: list[str]) -> dict[str, ExpertsModule]:
    """Modules with 3-D tensors of packed words; what is wrong with one is added to the problems."""
    candidates = set()
    for name, tensor in tensors.items():
        parent, _, last = name.rpartition(".")
        if len(tensor.shape) == 3 and last == "weight_packed":
            candidates.add(parent.rpartition(".")[0])
        elif len(tensor.shape) == 3 and last.endswith("_packed"):
            candidates.add(parent)
    found = {}
    for module in candidates:
        shapes = {key: tuple(tensors[f"{module}.{key}"].shape) for key in below(module, tensors)}
        own = {key: shape for key, shape in shapes.items() if split_key(key) is not None}
        try:
            layout = fused_layout(module, own)
        except ExpertsError as error:
            problems.append(str(error))
            continue
        if layout is not None:
            found[module] = fused_module(module, layout)
        elif is_called_experts(module):
            problems.append(unknown_spelling(module, {split[0] for key in own if (split := split_key(key))}))
    return found


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


def unknown_spelling(module: str, projections: Iterable[str]) -> str:
    """The error of an experts module whose projections no table knows."""
    known = "; ".join("/".join(s.projections) for s in NUMBERED)
    return (
        f"{module}: expected experts with the projections {known} (gate/up/down), got "
        f"{', '.join(sorted(projections))}. A projection is missing from the checkpoint, or the model spells "
        "them anew: then add the triple to repack/experts/spellings.py."
    )


def natural(name: str) -> list[tuple[int, int | str]]:
    """A sort key that puts layer 10 after layer 9."""
    return [(0, int(part)) if part.isdigit() else (1, part) for part in name.split(".")]


def below(module: str, tensors: Mapping[str, object]) -> list[str]:
    """Keys of `tensors` below a module, without its name."""
    prefix = f"{module}."
    return [name[len(prefix) :] for name in tensors if name.startswith(prefix)]
