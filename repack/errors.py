"""Errors of reading, repacking and storing checkpoints; all derive from `MarlinMoEError`."""

from ..kernels.errors import MarlinMoEError, MarlinMoEWarning

__all__ = [
    "CheckpointError",
    "ExpertsError",
    "MarlinMoEError",
    "MarlinMoEWarning",
    "PackedError",
    "PipelineError",
    "SchemeError",
    "ShardError",
    "VerifyError",
    "report",
]


class CheckpointError(MarlinMoEError, ValueError):
    """A checkpoint directory, its config, index or a file in it is not what it should be."""


class SchemeError(MarlinMoEError, ValueError):
    """A quantization config that cannot be read, or that Marlin cannot run."""


class ExpertsError(MarlinMoEError, ValueError):
    """The expert tensors of a layer are incomplete, disagree, or hold values that no layer can have."""


class ShardError(MarlinMoEError, ValueError):
    """A TP or EP size that does not divide what it has to."""


class PipelineError(MarlinMoEError, ValueError):
    """Stages that do not fit one another, or a stage that did not do what it declares."""


class PackedError(CheckpointError):
    """A packed checkpoint that is incomplete, altered, or of another version."""


class VerifyError(PackedError):
    """A packed checkpoint differs from its source."""


def report(subject: str, problems: list[str]) -> str:
    """One text of all problems: the problem itself, or a headline that counts them and a line each."""
    if len(problems) == 1:
        return problems[0]
    return "\n".join([f"{subject}: {len(problems)} problems.", *problems])
