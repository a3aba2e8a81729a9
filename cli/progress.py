"""How far a run is, on stderr: a bar on a terminal, a line every few seconds elsewhere."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

from .output import bytes_text

if TYPE_CHECKING:
    import rich.progress

    from ..repack.progress import Progress

SECONDS_BETWEEN_LINES = 5.0


@contextmanager
def shown_progress(verb: str) -> "Iterator[Progress]":
    """A `Progress` that shows a run called `verb` while the context is open."""
    if not sys.stderr.isatty():
        yield ProgressLines(verb)
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
    from rich.progress import TransferSpeedColumn as SpeedColumn

    name = TextColumn("{task.description}", markup=False)
    columns = (name, BarColumn(), DownloadColumn(), SpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        yield ProgressBar(verb, bar)


class ProgressBar:
    """`Progress` as a bar with bytes, speed and the time that is left."""

    def __init__(self, verb: str, bar: "rich.progress.Progress") -> None:
        self.verb = verb
        self.bar = bar
        self.task = bar.add_task(verb, total=None)

    def start(self, total_bytes: int) -> None:
        """The bar has its length."""
        self.bar.update(self.task, total=total_bytes)

    def advance(self, done_bytes: int, what: str) -> None:
        """The bar grows, and names what is at work."""
        self.bar.update(self.task, advance=done_bytes, description=f"{self.verb} {what}")


class ProgressLines:
    """`Progress` as lines of text, for logs: none in a short run, then one every few seconds."""

    def __init__(self, verb: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.verb = verb
        self.clock = clock
        self.total_bytes = 0
        self.done_bytes = 0
        self.said_at = clock()

    def start(self, total_bytes: int) -> None:
        """Remembers the total."""
        self.total_bytes = total_bytes
        self.said_at = self.clock()

    def advance(self, done_bytes: int, what: str) -> None:
        """Prints a line, unless the last one is less than `SECONDS_BETWEEN_LINES` old."""
        self.done_bytes += done_bytes
        now = self.clock()
        if now - self.said_at < SECONDS_BETWEEN_LINES:
            return
        self.said_at = now
        percent = 100 * self.done_bytes // max(1, self.total_bytes)
        done, total = bytes_text(self.done_bytes), bytes_text(self.total_bytes)
        click.echo(f"{self.verb}: {percent} %, {done} of {total}, at {what}", err=True)
