"""Processes that share one run, on one machine or many, as torchrun or Slurm start them: `Ranks`.

Rank and world size come from torch.distributed's environment (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT).
The processes have the source and the destination in common, on a file system that all of them see, and speak
to one another only to begin and to end together.
"""

import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

from .attendance import LONGEST_MEETING_S, LONGEST_SILENCE_S, Attendance, first_line
from .errors import MarlinMoEError

LONGEST_MEETING = timedelta(seconds=LONGEST_MEETING_S)
"""Until all ranks have started; a missing one is an error then."""

LONGEST_EXCHANGE = timedelta(seconds=LONGEST_SILENCE_S)
"""Of a few words between ranks that have all come."""

_meetings = itertools.count()
"""A process may meet the others several times, each time by keys of their own."""

VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """This process among those that share a run; alone by default."""

    rank: int = 0
    size: int = 1
    group: Any = None
    attendance: Attendance | None = None

    @property
    def is_first(self) -> bool:
        """Rank 0, which opens the run, writes the manifest and reports."""
        return self.rank == 0

    def share(self, items: Sequence[Item]) -> list[Item]:
        """This rank's part of items that all ranks have in the same order."""
        return list(items[self.rank :: self.size])

    def together(self, step: Callable[[], Result]) -> list[Result]:
        """The results of a step that every rank takes, in order of rank, once all have taken it.

        Raises:
            MarlinMoEError: another rank failed, with its words, or was lost.
            Exception: this rank's own, once all have taken the step.
        """
        if self.size == 1:
            return [step()]
        failure: Exception | None = None
        result: Result | None = None
        try:
            result = step()
        except Exception as error:
            failure = error
        told = None if failure is None else str(failure) or repr(failure)
        try:
            outcomes = self._exchange((told, result))
        except MarlinMoEError:
            if failure is None:
                raise
            raise failure  # noqa: B904 - this one's own fault, which may be why the others are not heard
        if failure is not None or any(text is not None for text, _ in outcomes):
            self._leave_together()
        if failure is not None:
            raise failure
        for rank, (text, _) in enumerate(outcomes):
            if text is not None:
                raise MarlinMoEError(f"rank {rank} of {self.size} failed: {text}")
        return [value for _, value in outcomes]

    def _exchange(self, mine: Any) -> list[Any]:
        import torch.distributed as dist

        outcomes: list[Any] = [None] * self.size
        if self.attendance is not None:
            self.attendance.meet()
        try:
            dist.all_gather_object(outcomes, mine, group=self.group)
        except RuntimeError as error:
            raise MarlinMoEError(
                f"rank {self.rank}: expected to hear from all {self.size} ranks, got {first_line(error)}. "
                "A rank was lost. Run the same command again: it completes what is missing."
            ) from error
        return outcomes

    def _leave_together(self) -> None:
        """Wait until no rank speaks any more: gloo aborts where a connection closes in mid-sentence."""
        if self.attendance is not None:
            with suppress(MarlinMoEError):  # the rank that keeps the store may have gone, after all others
                self.attendance.meet()


ALONE = Ranks()


@contextmanager
def ranks_from_environment() -> Iterator[Ranks]:
    """The ranks that torch.distributed's environment describes, with a gloo group; `ALONE` without one.

    Raises:
        MarlinMoEError: a variable is missing or no number, or the ranks do not find one another.
    """
    size = _number("WORLD_SIZE", default=1)
    if size == 1:
        yield ALONE
        return
    missing = [name for name in VARIABLES if not os.environ.get(name)]
    if missing:
        raise MarlinMoEError(
            f"WORLD_SIZE={size}: expected {', '.join(VARIABLES)} beside it, as torchrun sets them, got no "
            f"{', '.join(missing)}. Start it with torchrun, or unset WORLD_SIZE to run alone."
        )
    rank = _number("RANK", default=0)
    if rank >= size:
        raise MarlinMoEError(
            f"RANK={rank}: expected less than WORLD_SIZE={size}, because ranks count from 0. Start it with "
            "torchrun, or set both as it does."
        )
    import torch.distributed as dist
    from torch.distributed.rendezvous import rendezvous

    ours = not dist.is_initialized()
    attendance = None
    try:
        if ours:
            store, _, _ = next(rendezvous("env://", timeout=LONGEST_MEETING))
        else:
            store = dist.distributed_c10d._get_default_store()
        attendance = Attendance(store, rank, size, name=f"marlin-moe/{next(_meetings)}")
        attendance.meet()
        if ours:
            dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=LONGEST_EXCHANGE)
        group = None if ours else dist.new_group(backend="gloo", timeout=LONGEST_EXCHANGE)
    except Exception as error:
        if attendance is not None:
            attendance.end(early=True)
        if not isinstance(error, (RuntimeError, ValueError)):
            raise
        raise MarlinMoEError(
            f"rank {rank} of {size}: expected to meet the others at "
            f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}, got {first_line(error)}. "
            "Start all ranks with one torchrun, or one rendezvous."
        ) from error
    early = True
    try:
        ranks = Ranks(rank=rank, size=size, group=group, attendance=attendance)
        yield ranks
        early = False
        ranks._leave_together()
    finally:
        attendance.end(early=early)
        dist.destroy_process_group(group)


def _number(name: str, *, default: int) -> int:
    text = os.environ.get(name)
    if text is None:
        return default
    if not text.isdecimal():
        raise MarlinMoEError(f"{name}: expected a number, as torchrun sets it, got {text!r}. Unset it.")
    return int(text)
