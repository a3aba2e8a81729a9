"""Which backend runs a problem: every candidate is accepted, or rejected with the reason."""

from dataclasses import dataclass
from types import ModuleType

from ..errors import BackendError
from ..plan.problem import MoEProblem
from . import cuda_moe, reference, triton_moe

BACKENDS: dict[str, ModuleType] = {"cuda": cuda_moe, "triton": triton_moe, "reference": reference}
"""In order of preference: the first that accepts runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What a backend says to a problem; `reason` is None where it accepts."""

    backend: str
    reason: str | None

    @property
    def accepted(self) -> bool:
        """Whether the backend runs the problem."""
        return self.reason is None

    def __str__(self) -> str:
        return f"{self.backend}: " + (
            "accepted" if self.reason is None else f"rejected, because {self.reason}"
        )


def verdicts(problem: MoEProblem) -> list[Verdict]:
    """The verdict of every backend, in order of preference."""
    return [
        Verdict(backend=name, reason=backend.reason_against(problem)) for name, backend in BACKENDS.items()
    ]


def choose_backend(problem: MoEProblem, requested: str | None) -> str:
    """The name of the backend asked for, or of the first that accepts.

    Raises:
        TypeError: `requested` is no str.
        BackendError: no such backend, or it rejects the problem, or all do; the text lists every verdict.
    """
    if requested is not None and not isinstance(requested, str):
        raise TypeError(f"backend: expected a name or None, got {type(requested).__name__} {requested!r}.")
    found = verdicts(problem)
    if requested is not None and requested not in BACKENDS:
        raise BackendError(
            f"backend: expected None or one of {', '.join(BACKENDS)}, got {requested!r}.{_list(found)}"
        )
    for verdict in found:
        if verdict.accepted and requested in (None, verdict.backend):
            return verdict.backend
    wanted = "a backend that accepts the call" if requested is None else f"{requested} to accept the call"
    raise BackendError(f"backend: expected {wanted}, got none.{_list(found)}")


def _list(found: list[Verdict]) -> str:
    return "".join(f"\n  {verdict}" for verdict in found)
