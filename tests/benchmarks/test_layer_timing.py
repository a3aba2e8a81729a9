"""How samples are taken, without a device; and the end of a step that hangs."""

import subprocess
import sys

import layer_timing
import pytest
from layer_timing import Protocol, measure

from tree import ROOT


class FakeReplays:
    """Samples that are given."""

    def __init__(self, name: str, log: list[str], samples: list[float]) -> None:
        self.name, self.log, self.given = name, log, list(samples)
        self.samples, self.sample_ms = len(samples), 1.0

    def sample_us(self) -> float:
        self.log.append(self.name)
        return self.given.pop(0)

    def sustained_us(self, load_ms: float) -> float:
        self.log.append(f"{self.name} under {load_ms:.0f} ms of load")
        return 9.0


def test_bursts_take_turns_after_a_rest_and_the_median_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    rests: list[float] = []
    monkeypatch.setattr(layer_timing.time, "sleep", rests.append)
    log: list[str] = []
    replays = {
        "a": FakeReplays("a", log, [5.0, 1.0, 2.0]),
        "b": FakeReplays("b", log, [4.0, 3.0]),  # long: fewer samples
    }
    replays["b"].sample_ms = 80.0
    found = measure(replays, Protocol(samples=3, rest_ms=4.0, most_rest_ms=100.0, load_ms=50.0))
    assert log == ["a", "b", "a", "b", "a", "a under 50 ms of load", "b under 50 ms of load"]
    assert rests == [0.004, 0.1, 0.004, 0.1, 0.004]
    assert (found["a"].burst_us, found["b"].burst_us) == (2.0, 3.5)
    assert found["a"].sustained_us == 9.0


@pytest.mark.parametrize(("seconds", "code"), [(0.2, 3), (60, 0)])
def test_a_step_that_hangs_ends_the_process_and_says_where(seconds: float, code: int) -> None:
    program = f"""
import sys, time
sys.path.append({str(ROOT / "benchmarks")!r})
from layer_timing import watched
with watched("M=1 ours", seconds={seconds}):
    time.sleep(0 if {code == 0} else 60)
"""
    command = [sys.executable, "-c", program]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert result.returncode == code
    assert ("M=1 ours: no end after 0 s" in result.stderr) == (code == 3)
    assert ("time.sleep" in result.stderr or "<string>" in result.stderr) == (code == 3)
