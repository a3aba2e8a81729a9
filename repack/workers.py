"""Files made or read side by side: threads of this process, each on a file of its own."""

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from typing import TypeVar

import torch

from ..kernels.checks import check_type
from .errors import MarlinMoEError
from .progress import Progress

MAX_WORKERS = 16
"""Workers by default on a machine of many cores: more would only wait for its disk."""

EXPERTS_BYTES = 192 << 20
"""Experts of this size in all, one a worker, keep a process of default workers well below 1 GB."""

Result = TypeVar("Result")


class Stopped(Exception):
    """Another thread has failed."""


class SharedProgress:
    """`Progress` of several threads: one call at a time, and after `stop` none comes back."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._lock = threading.Lock()
        self._stopped = False

    def start(self, total_bytes: int) -> None:
        """Passed on."""
        self._progress.start(total_bytes)

    def advance(self, done_bytes: int, what: str) -> None:
        """Passed on; `Stopped` where another thread has failed."""
        with self._lock:
            if self._stopped:
                raise Stopped
            self._progress.advance(done_bytes, what)

    def stop(self) -> None:
        """Every thread ends at its next `advance`."""
        self._stopped = True


def worker_count(workers: int | None, device: torch.device, *, expert_bytes: int) -> int:
    """The workers asked for; None is one a core, and on a GPU one, which keeps several blocks on their way.

    A process that torchrun started has its part of the cores. Each worker holds at least one expert of
    `expert_bytes`, so there are fewer where experts are large.
    """
    check_type("workers", workers, int, optional=True)
    if workers is not None:
        if workers < 1:
            raise MarlinMoEError(f"workers: expected at least 1, got {workers}.")
        return workers
    if device.type != "cpu":
        return 1
    here = os.environ.get("LOCAL_WORLD_SIZE", "1")
    processes = int(here) if here.isdecimal() else 1
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    fitting = EXPERTS_BYTES // max(1, expert_bytes)
    return max(1, min(MAX_WORKERS, fitting, cores // max(1, processes)))


def run_all(tasks: Sequence[Callable[[], Result]], workers: int, progress: SharedProgress) -> list[Result]:
    """The results of all tasks, in order, `workers` of them at a time.

    The first error ends the others, where they report their progress, and is raised when they have ended.
    """
    if workers == 1 or len(tasks) < 2:
        return [task() for task in tasks]
    with (
        _torch_threads(workers) as share,
        ThreadPoolExecutor(
            min(workers, len(tasks)),
            thread_name_prefix="marlin-moe-file",
            initializer=torch.set_num_threads,
            initargs=(share,),
        ) as pool,
    ):
        futures = [pool.submit(task) for task in tasks]
        try:
            for future in as_completed(futures):
                future.result()
        except BaseException:
            progress.stop()
            for future in futures:
                future.cancel()
            raise
        return [future.result() for future in futures]


@contextmanager
def _torch_threads(workers: int) -> Iterator[int]:
    """Torch's threads for each worker; what a new thread of the caller's would have is restored."""
    before = torch.get_num_threads()
    try:
        yield max(1, before // workers)
    finally:
        torch.set_num_threads(before)
