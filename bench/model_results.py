"""What a model benchmark found, as a file: `ModelResults`, with a `ModelRun` of each variant."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..kernels.errors import MarlinMoEError

FORMAT = "marlin-moe model benchmark"
VERSION = 1


class ModelResultsError(MarlinMoEError):
    """A file that holds no results of a model benchmark, or cannot be written."""


@dataclass(slots=True, kw_only=True)
class ModelRun:
    """One variant.

    Attributes:
        variant: its name.
        weights_bytes: allocated on the device once the model is there; None where the device does not say.
        peak_bytes: the most that was allocated from then on, by measurements that ran out of memory too.
        ttft_ms: tokens of the prompt -> median milliseconds from the call of generate() to the first token.
        token_ms: batch -> median milliseconds a step of generate().
        graph_token_ms: batch -> milliseconds a step of a replayed CUDA graph, greedy, with a static cache.
        skipped: what was not measured (`ttft 8192`, `graph 32`, `all`) -> why.
        same_tokens: greedy tokens equal the first variant's.
    """

    variant: str
    weights_bytes: int | None = None
    peak_bytes: int | None = None
    ttft_ms: dict[int, float] = field(default_factory=dict)
    token_ms: dict[int, float] = field(default_factory=dict)
    graph_token_ms: dict[int, float] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    same_tokens: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelResults:
    """A run: on what machine, of what checkpoint, how, and its variants.

    Attributes:
        machine: device and versions.
        checkpoint: name, model, layers, dtype; `packed_bytes` of all its tensors.
        protocol: context_tokens, steps and repeats.
        runs: a variant each.
    """

    machine: dict[str, str]
    checkpoint: dict[str, Any]
    protocol: dict[str, int]
    runs: list[ModelRun]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"format": FORMAT, "version": VERSION, **asdict(self)}

    def require_measured(self) -> None:
        """ModelResultsError where no variant could be measured at any point; reasons are in the runs."""
        if not any(run.ttft_ms or run.token_ms or run.graph_token_ms for run in self.runs):
            raise ModelResultsError(
                "results: expected at least one measured variant, got none: each has its reason in the "
                "report. Choose smaller --prompts and --batches, or other variants."
            )

    def write(self, path: Path) -> None:
        """The results as a file; ModelResultsError where none can be written."""
        try:
            path.write_text(json.dumps(self.as_dict(), indent=1) + "\n")
        except OSError as error:
            raise ModelResultsError(
                f"{path}: expected a file that can be written, got: {error}. Give another --output."
            ) from error

    @classmethod
    def read(cls, path: Path) -> "ModelResults":
        """The results in a file; ModelResultsError where it holds none."""
        try:
            content = json.loads(path.read_bytes())
        except (OSError, ValueError) as error:
            raise ModelResultsError(f"{path}: expected results as JSON, got: {error}.") from error
        if not isinstance(content, dict) or (content.get("format"), content.get("version")) != (
            FORMAT,
            VERSION,
        ):
            found = content.get("format") if isinstance(content, dict) else type(content).__name__
            raise ModelResultsError(
                f"{path}: expected {FORMAT!r}, version {VERSION}, which `marlin-moe bench model` writes, got "
                f"{found!r}."
            )
        try:
            runs = [_run(run) for run in content["runs"]]
            return cls(
                machine=content["machine"],
                checkpoint=content["checkpoint"],
                protocol=content["protocol"],
                runs=runs,
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ModelResultsError(
                f"{path}: expected results of a model benchmark, got others: {error!r}."
            ) from error


def is_model_results(path: Path) -> bool:
    """Whether a file says that it holds results of a model benchmark; what else it is does not matter."""
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return False
    return isinstance(content, dict) and content.get("format") == FORMAT


def _run(content: Mapping[str, Any]) -> ModelRun:
    """A run of its JSON, whose counts of tokens are keys and so text."""
    counted = {
        name: {int(count): float(ms) for count, ms in content[name].items()}
        for name in ("ttft_ms", "token_ms", "graph_token_ms")
    }
    return ModelRun(**{**content, **counted})
