"""Which ranks have come to a step and which are silent, told through the store of torch.distributed.

Every rank says every few seconds that it lives and how many steps it has come to. So whoever waits for the
others hears that one still works, however long that takes, or that one was lost, also by a host that went
without closing its connections. A thread does all the talking: a call on the store of such a host does not
come back.
"""

import threading
import time
from dataclasses import dataclass
from typing import Any

from .errors import MarlinMoEError

BEAT_S = 5.0
"""Between two signs of life; while others are waited for at most `WAITING_BEAT_S`."""

WAITING_BEAT_S = 1.0

LONGEST_SILENCE_S = 120.0
"""A rank that gives no sign for so long is lost."""

LONGEST_MEETING_S = 1800.0
"""Until the first sign of every rank: some may start later."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sign:
    """What a rank says: the number of the sign, the steps it has come to, whether it left before the end."""

    number: int = 0
    steps: int = 0
    gone: bool = False

    @classmethod
    def from_text(cls, text: str) -> "Sign":
        """The inverse of `as_text`."""
        number, steps, gone = map(int, text.split())
        return cls(number=number, steps=steps, gone=bool(gone))

    def as_text(self) -> str:
        """For the store."""
        return f"{self.number} {self.steps} {int(self.gone)}"


UNHEARD = Sign()


class Attendance:
    """This rank in the roll call of all ranks, until `end`.

    Args:
        store: keys and values that all ranks see, a `torch.distributed.Store`.
        rank, size: which of how many.
        name: of this roll call in the store.
    """

    def __init__(self, store: Any, rank: int, size: int, *, name: str = "marlin-moe") -> None:
        self._store, self._rank, self._size = store, rank, size
        self._keys = [f"{name}/{rank}" for rank in range(size)]
        self._steps, self._gone, self._ended = 0, False, False
        self._heard: dict[int, Sign] = {}
        self._rounds = 0
        self._failure: Exception | None = None
        self._pause = BEAT_S
        self._hurry = threading.Event()
        self._news = threading.Condition()
        self._thread = threading.Thread(target=self._talk, name="marlin-moe-attendance", daemon=True)
        self._thread.start()

    def meet(self) -> None:
        """Return when every rank has come to its call of the same number.

        Raises:
            MarlinMoEError: a rank that has not is silent or has left, or the store is silent; it says which.
        """
        self._steps += 1
        self._pause = 0.01
        self._hurry.set()
        try:
            with self._news:
                self._wait()
        finally:
            self._pause = BEAT_S

    def end(self, *, early: bool) -> None:
        """No more signs. After an early end the others do not wait for this rank.

        Rank 0, which may keep the store, goes last, if the others go soon.
        """
        if self._rank == 0:
            self._see_others_off()
        if not early:
            self._steps += 1  # beyond the last call: rank 0 sees that this rank has left
        self._gone, self._ended = early, True
        self._hurry.set()
        self._thread.join(timeout=BEAT_S)

    def _see_others_off(self) -> None:
        deadline = time.monotonic() + BEAT_S
        self._pause = 0.01
        self._hurry.set()
        with self._news:
            while time.monotonic() < deadline and self._failure is None:
                if all(self._sign(r).gone or self._sign(r).steps > self._steps for r in range(1, self._size)):
                    break
                self._news.wait(timeout=WAITING_BEAT_S)

    def _wait(self) -> None:
        rounds, round_at = self._rounds, time.monotonic()
        last: dict[int, tuple[Sign, float]] = {}  # rank -> its last sign, and when it came
        while absent := [rank for rank in range(self._size) if self._sign(rank).steps < self._steps]:
            now = time.monotonic()
            if self._rounds != rounds:
                rounds, round_at = self._rounds, now
            if self._failure is not None or now - round_at > LONGEST_SILENCE_S:
                raise self._store_lost()
            for rank in absent:
                sign = self._sign(rank)
                if rank not in last or last[rank][0] != sign:
                    last[rank] = sign, now
            lost = {rank: reason for rank in absent if (reason := _reason(*last[rank], now))}
            if lost:
                raise self._lost(absent, lost)
            self._news.wait(timeout=WAITING_BEAT_S)

    def _sign(self, rank: int) -> Sign:
        return self._heard.get(rank, UNHEARD)

    def _store_lost(self) -> MarlinMoEError:
        found = first_line(self._failure) if self._failure else f"no answer for {LONGEST_SILENCE_S:.0f} s"
        return MarlinMoEError(
            f"rank {self._rank} of {self._size}: expected the store of torch.distributed, which rank 0 or "
            f"torchrun keeps, to answer, got {found}. The host that keeps it was lost. Run the same command "
            "again: it completes what is missing."
        )

    def _lost(self, absent: list[int], lost: dict[int, str]) -> MarlinMoEError:
        reasons = ", ".join(f"rank {rank} {reason}" for rank, reason in lost.items())
        return MarlinMoEError(
            f"rank {self._rank} of {self._size}: expected all ranks to come, got {self._size - len(absent)} "
            f"of them: {reasons}. Run the same command again: it completes what is missing."
        )

    def _talk(self) -> None:
        number = 0
        while True:
            self._hurry.clear()
            number, ended = number + 1, self._ended
            try:
                heard = self._round(Sign(number=number, steps=self._steps, gone=self._gone))
            except Exception as error:  # whatever the store meets; the one who waits raises it
                with self._news:
                    self._failure = error
                    self._news.notify_all()
                return
            with self._news:
                self._heard = heard
                self._rounds += 1
                self._news.notify_all()
            if ended:
                return
            self._hurry.wait(timeout=self._pause)
            self._pause = min(1.5 * self._pause, WAITING_BEAT_S if self._pause < BEAT_S else BEAT_S)

    def _round(self, mine: Sign) -> dict[int, Sign]:
        """Say where this rank is; hear what the others say."""
        self._store.set(self._keys[self._rank], mine.as_text())
        heard = {rank: key for rank, key in enumerate(self._keys) if self._store.check([key])}
        return {rank: Sign.from_text(self._store.get(key).decode()) for rank, key in heard.items()}


def first_line(error: Exception) -> str:
    """What torch.distributed says, without its stack."""
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")


def _reason(sign: Sign, since: float, now: float) -> str | None:
    """Why a rank that has not come is not waited for, or None."""
    if sign.gone:
        return "has left"
    if now - since > (LONGEST_MEETING_S if sign == UNHEARD else LONGEST_SILENCE_S):
        return f"{'never came' if sign == UNHEARD else 'gave no sign of life'} in {now - since:.0f} s"
    return None
