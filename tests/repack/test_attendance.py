"""Ranks that come, work long, fall silent or leave: threads of this process, over a store in memory."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch.distributed as dist

from marlin_moe.repack import attendance
from marlin_moe.repack.attendance import Attendance
from marlin_moe.repack.errors import MarlinMoEError


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times a hundredth of the usual ones."""
    monkeypatch.setattr(attendance, "BEAT_S", 0.05)
    monkeypatch.setattr(attendance, "WAITING_BEAT_S", 0.02)
    monkeypatch.setattr(attendance, "LONGEST_SILENCE_S", 2.0)
    monkeypatch.setattr(attendance, "LONGEST_MEETING_S", 3.0)


@contextmanager
def present(store: Any, size: int, ranks: range) -> Iterator[list[Attendance]]:
    here = [Attendance(store, rank, size) for rank in ranks]
    try:
        yield here
    finally:
        for one in here:
            one.end(early=False)


def in_threads(works: list[Callable[[], Any]]) -> list[Exception | None]:
    """What each raised."""
    found: list[Exception | None] = [None] * len(works)

    def run(i: int) -> None:
        try:
            works[i]()
        except Exception as error:
            found[i] = error

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert not any(thread.is_alive() for thread in threads)
    return found


def test_nobody_goes_on_before_all_have_come(short: None) -> None:
    come: list[tuple[int, int]] = []

    def work(one: Attendance, rank: int) -> None:
        for step in range(20):
            time.sleep(0.002 * ((rank + step) % 3))
            come.append((step, rank))
            one.meet()
            assert len([s for s, _ in come if s == step]) == 3

    with present(dist.HashStore(), 3, range(3)) as here:
        assert in_threads([lambda o=one, r=r: work(o, r) for r, one in enumerate(here)]) == [None] * 3


def test_a_rank_that_works_is_waited_for_however_long(short: None) -> None:
    with present(dist.HashStore(), 2, range(2)) as here:
        started = time.monotonic()

        def late() -> None:
            time.sleep(2 * attendance.LONGEST_SILENCE_S)
            here[1].meet()

        assert in_threads([here[0].meet, late]) == [None, None]
        assert time.monotonic() - started > 2 * attendance.LONGEST_SILENCE_S


class CutOff:
    """A store that no longer hears one rank."""

    unheard = ""

    def __init__(self) -> None:
        self.store = dist.HashStore()

    def set(self, key: str, value: str) -> None:
        if key != self.unheard:
            self.store.set(key, value)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)


def test_a_rank_that_falls_silent_is_named(short: None) -> None:
    store = CutOff()
    with present(store, 3, range(3)) as here:
        assert in_threads([one.meet for one in here]) == [None] * 3
        store.unheard = "marlin-moe/1"
        errors = in_threads([here[0].meet, here[2].meet])
    for rank, error in zip((0, 2), errors, strict=True):
        assert isinstance(error, MarlinMoEError)
        expected = (
            rf"rank {rank} of 3: .*got [12] of them: rank 1 gave no sign of life in \d s\. Run the same"
        )
        assert re.search(expected, str(error)), error


def test_ranks_that_never_come_are_named_and_waited_for_longer(short: None) -> None:
    started = time.monotonic()
    with (
        present(dist.HashStore(), 4, range(0, 4, 2)) as here,
        pytest.raises(MarlinMoEError, match=r"got 1 of them: rank 1 never came in . s, rank 3 never came in"),
    ):
        here[0].meet()
    assert time.monotonic() - started > attendance.LONGEST_MEETING_S


def test_a_rank_that_leaves_is_not_waited_for(short: None) -> None:
    started = time.monotonic()
    with present(dist.HashStore(), 2, range(2)) as here:
        here[1].end(early=True)
        with pytest.raises(MarlinMoEError, match="rank 1 has left"):
            here[0].meet()
    assert time.monotonic() - started < attendance.LONGEST_SILENCE_S


def test_a_rank_that_leaves_early_has_not_come_to_the_next_step(short: None) -> None:
    with present(dist.HashStore(), 3, range(3)) as here:
        for _ in range(2):
            assert in_threads([one.meet for one in here]) == [None] * 3
        here[1].end(early=True)
        for error in in_threads([here[0].meet, here[2].meet]):
            assert isinstance(error, MarlinMoEError)
            assert "of them: rank 1 has left" in str(error)


def test_rank_0_which_may_keep_the_store_goes_last(short: None) -> None:
    left: list[int] = []

    def leave(one: Attendance, rank: int, after: float) -> None:
        time.sleep(after)
        one.end(early=False)
        left.append(rank)

    attendance.BEAT_S = 5.0  # as long as rank 0 waits; the fixture restores it
    store = dist.HashStore()
    here = [Attendance(store, rank, 3) for rank in range(3)]
    works = [lambda o=one, r=rank: leave(o, r, 0.4 * r) for rank, one in enumerate(here)]
    assert in_threads(works) == [None] * 3
    assert left == [1, 2, 0]


class Deaf:
    """A store whose host is lost after some calls: the next one fails, or does not come back."""

    def __init__(self, calls: int, *, hangs: bool) -> None:
        self.store, self.calls, self.hangs = dist.HashStore(), calls, hangs

    def __getattr__(self, name: str) -> Any:
        self.calls -= 1
        if self.calls < 0:
            if self.hangs:
                threading.Event().wait(5)
            raise RuntimeError("Connection reset by peer")
        return getattr(self.store, name)


@pytest.mark.parametrize(
    ("hangs", "found"), [(False, "Connection reset by peer"), (True, "no answer for 2 s")]
)
def test_a_store_that_is_lost(short: None, hangs: bool, found: str) -> None:
    with (
        present(Deaf(20, hangs=hangs), 2, range(1)) as here,
        pytest.raises(
            MarlinMoEError, match=rf"expected the store .* got {found}.* The host that keeps it was"
        ),
    ):
        here[0].meet()


SILENT = """
import os, signal, sys
from marlin_moe.repack import attendance, ranks
attendance.BEAT_S, attendance.LONGEST_SILENCE_S = 0.5, 3.0
with ranks.ranks_from_environment() as here:
    here.together(lambda: None)
    print("met", flush=True)
    if here.rank == int(sys.argv[1]):
        os.kill(os.getpid(), signal.SIGSTOP)
    here.together(lambda: None)
"""


@pytest.mark.parametrize("lost", [0, 1])
def test_a_host_that_is_gone_without_a_word(lost: int) -> None:
    """A stopped process keeps its connections and answers nothing; rank 0 keeps the store."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    own = os.environ | {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", SILENT, str(lost)],
            env=own | {"RANK": str(rank), "PYTHONSAFEPATH": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        out, err = ranks[1 - lost].communicate(timeout=60)
    finally:
        for rank in ranks:
            rank.send_signal(signal.SIGKILL)
            rank.communicate()
    assert out == "met\n", err
    assert ranks[1 - lost].returncode == 1
    expected = r"store .* got no answer for 3 s" if lost == 0 else r"rank 1 gave no sign of life in [34] s"
    assert re.search(expected, err), err
