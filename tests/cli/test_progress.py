"""What is said of a run's progress, on a terminal and elsewhere."""

import io
import sys

import pytest

from marlin_moe.cli.progress import SECONDS_BETWEEN_LINES, ProgressLines, shown_progress


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_short_run_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with shown_progress("repack") as progress:
        progress.start(100)
        progress.advance(100, "experts-0.safetensors")
    assert capsys.readouterr() == ("", "")


def test_a_long_run_says_a_line_every_few_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    progress = ProgressLines("repack", clock=clock)
    clock.now = 100.0  # preparing took long
    progress.start(4_000_000)
    for step in range(8):
        clock.now += SECONDS_BETWEEN_LINES / 2
        progress.advance(500_000, f"layer {step}")
    assert capsys.readouterr() == (
        "",
        "repack: 25 %, 1.00 MB of 4.00 MB, at layer 1\n"
        "repack: 50 %, 2.00 MB of 4.00 MB, at layer 3\n"
        "repack: 75 %, 3.00 MB of 4.00 MB, at layer 5\n"
        "repack: 100 %, 4.00 MB of 4.00 MB, at layer 7\n",
    )


def test_nothing_to_do_divides_by_nothing() -> None:
    progress = ProgressLines("verify", clock=lambda: 1e9)
    progress.said_at = 0.0
    progress.start(0)
    progress.said_at = 0.0
    progress.advance(0, "nothing")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_shows_a_bar_on_stderr(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    with shown_progress("unpack") as progress:
        progress.start(1_000_000)
        progress.advance(250_000, "model.[b].safetensors")
        progress.bar.refresh()  # type: ignore[attr-defined]
        (task,) = progress.bar.tasks  # type: ignore[attr-defined]
        assert (task.completed, task.total) == (250_000, 1_000_000)
    assert "unpack model.[b].safetensors" in terminal.getvalue()
    assert capsys.readouterr().out == ""
