"""A finished packed checkpoint where one is to be made: is it the one that would be made?"""

from collections.abc import Iterator
from functools import partial

from ..errors import PackedError
from ..workers import SharedProgress, run_all
from .compare import Comparison, file_comparisons, source_comparisons
from .differences import Problem
from .load import refuse_dead
from .make_files import FileMaker
from .manifest import Manifest
from .names import MANIFEST
from .reader import PackedCheckpoint


def already_made(maker: FileMaker, progress: SharedProgress, *, workers: int) -> Manifest:
    """The manifest of the finished checkpoint in the destination, which is that of the same source.

    Its files are there with their sizes and headers, and the source has the names, sizes, headers, config and
    companions that it was packed from. Where a file of the source is younger than the manifest everything is
    compared, byte for byte.

    Raises:
        PackedError: it is damaged, or of another source.
        ExpertsError: it has dead experts, which are not accepted.
    """
    destination, checkpoint = maker.journal.destination, maker.checkpoint
    with PackedCheckpoint(destination) as packed:
        made = (destination / MANIFEST).stat().st_mtime_ns
        younger = any(max(times) > made for _, *times in maker.plan.stamps.values())
        comparisons: list[Comparison] = list(file_comparisons(packed, checkpoint))
        progress.start(0)
        if younger and not any(_first(task) for task in comparisons):
            progress.start(sum(entry.nbytes for entry in checkpoint.tensors.values()))
            comparisons = source_comparisons(packed, checkpoint, progress, block_bytes=maker.block_bytes)
        problems = run_all([partial(_first, task) for task in comparisons], workers, progress)
        for problem in filter(None, problems):
            raise PackedError(
                f"{destination}: expected an empty directory, none, or the finished packed checkpoint of "
                f"{checkpoint.path}, got a finished packed checkpoint that differs from it: "
                f"{problem.message} Remove it first, or choose another destination."
            )
        for layer in packed.manifest.layers:
            refuse_dead(layer, allowed=maker.allow_dead_experts)
        return packed.manifest


def _first(task: Comparison) -> Problem | None:
    found: Iterator[Problem] = task()
    return next(found, None)
