"""Where the routed experts of a checkpoint are: found by their tensors, not by the model's type.

A module of numbered experts has children `<number>.<projection>.<field>` with a known triple of projections
(`spellings`), whatever stands before: `model.layers.3.mlp.experts`, `…block_sparse_moe.experts`,
`language_model.…feed_forward.experts`.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ..errors import ExpertsError, report
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
    """

    name: str
    spelling: Spelling
    experts: tuple[int, ...]
    keys: tuple[str, ...]
    fields: frozenset[str]

    @property
    def quantized(self) -> bool:
        """Whether any projection has packed words; plain weights are carried over untouched."""
        return bool(self.fields & PACKED_FIELDS)


PACKED_FIELDS = frozenset({"weight_packed", "qweight"})


def find_experts(names: Iterable[str]) -> dict[str, ExpertsModule]:
    """Every module of numbered experts among a checkpoint's tensor names, in natural order.

    Raises:
        ExpertsError: a module called after experts whose projections are no known triple; it lists what was
        seen.
    """
    found: dict[str, list[re.Match[str]]] = {}
    for name in names:
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
    if problems:
        raise ExpertsError(report("experts", problems))
    return dict(sorted(modules.items(), key=lambda item: natural(item[0])))


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
