"""A finished checkpoint where one is to be made: is it the one that would be made?"""

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from ..checkpoint import Checkpoint
from ..errors import CheckpointError, PackedError
from ..workers import SharedProgress, run_all
from .compare import Comparison, file_comparisons, tensor_comparisons
from .differences import Problem
from .durable import system_errors
from .load import refuse_dead
from .make_files import FileMaker
from .manifest import Manifest
from .reader import PackedCheckpoint


def already_packed(maker: FileMaker, progress: SharedProgress, *, workers: int) -> Manifest:
    """The manifest of the finished packed checkpoint in the destination, which is that of the same source.

    Its files are there with their sizes and headers, and the source has the names, sizes, headers, config and
    companions that it was packed from, and the same bytes: all are compared, since two checkpoints of one
    model may differ in nothing else, whatever their ages.

    Raises:
        PackedError: it is damaged, or of another source.
        ExpertsError: it has dead experts, which are not accepted.
    """
    destination, checkpoint = maker.journal.destination, maker.checkpoint
    with PackedCheckpoint(destination) as packed:
        problem = _difference(packed, checkpoint, progress, workers=workers, block_bytes=maker.block_bytes)
        if problem:
            raise PackedError(
                f"{destination}: expected an empty directory, none, or the finished packed checkpoint of "
                f"{checkpoint.path}, got a finished packed checkpoint that differs from it: "
                f"{problem.message} Remove it first, or choose another destination."
            )
        for layer in packed.manifest.layers:
            refuse_dead(layer, allowed=maker.allow_dead_experts)
        return packed.manifest


def refuse_other_source(
    packed: PackedCheckpoint, destination: Path, progress: SharedProgress, *, block_bytes: int
) -> None:
    """Raise PackedError where the checkpoint in the destination is not what unpacking would write there.

    Compared as in `already_packed`.
    """
    try:
        with Checkpoint(destination) as found, system_errors(f"{destination}: looking at its files"):
            problem = _difference(packed, found, progress, workers=1, block_bytes=block_bytes)
    except CheckpointError as error:
        names = sorted(os.listdir(destination))
        raise PackedError(
            f"{destination}: expected an empty directory, none, or the unpacked {packed.path}, got "
            f"{len(names)} files or folders ({', '.join(names[:4])}). Choose another destination."
        ) from error
    if problem:
        raise PackedError(
            f"{destination}: expected an empty directory, none, or the unpacked {packed.path}, got a "
            f"checkpoint that differs from it: {problem.message} Choose another destination."
        )


def _difference(
    packed: PackedCheckpoint,
    source: Checkpoint,
    progress: SharedProgress,
    *,
    workers: int,
    block_bytes: int,
) -> Problem | None:
    """The first in which they differ: by names, sizes and headers, then by every byte."""
    progress.start(0)
    for task in file_comparisons(packed, source):
        if problem := _first(task):
            return problem
    progress.start(sum(entry.nbytes for entry in source.tensors.values()))
    comparisons = tensor_comparisons(packed, source, progress, block_bytes=block_bytes)
    return next(
        filter(None, run_all([partial(_first, task) for task in comparisons], workers, progress)), None
    )


def _first(task: Comparison) -> Problem | None:
    found: Iterator[Problem] = task()
    return next(found, None)
