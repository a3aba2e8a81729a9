"""How time is taken: graph replays after rest (burst) and under load (sustained), eager calls."""

import faulthandler
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from layer_problems import Ceilings

SPIN_CYCLES = 100_000  # the device spins while the host hands over what is timed
COPY_BYTES = 2 << 30
MATMUL_SIZE = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class Protocol:
    """How long and how often.

    Attributes:
        samples: of each kind; the median counts.
        sample_ms: replays of one sample take about as long, at least one.
        rest_ms, most_rest_ms: before a burst sample the device idles for twice the sample, within these.
        load_ms: the device is kept busy as long before the sustained samples.
        eager_samples: passes over the layers without a graph, each timed by the host's clock to its end.
        long_ms: a sample that takes longer than this is repeated `long_samples` times only.
    """

    samples: int = 11
    sample_ms: float = 0.5
    rest_ms: float = 4.0
    most_rest_ms: float = 100.0
    load_ms: float = 50.0
    eager_samples: int = 40
    long_ms: float = 20.0
    long_samples: int = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Median microseconds a layer."""

    burst_us: float
    sustained_us: float


class Replays:
    """A function's graph over several layers, and how often a sample replays it."""

    def __init__(self, run: Callable[[], None], *, layers: int, protocol: Protocol) -> None:
        self.layers = layers
        self.graph = captured(run)
        for _ in range(3):
            self.graph.replay()
        self.replays = 1
        once_ms = self.sample_us() * layers / 1e3
        self.replays = max(1, min(16, round(protocol.sample_ms / once_ms)))
        self.sample_ms = once_ms * self.replays
        self.samples = protocol.samples if self.sample_ms < protocol.long_ms else protocol.long_samples

    def sample_us(self) -> float:
        """Microseconds a layer of one sample."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(SPIN_CYCLES)
        start.record()
        for _ in range(self.replays):
            self.graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e3 / (self.replays * self.layers)

    def sustained_us(self, load_ms: float) -> float:
        """The median sample after `load_ms` of load."""
        for _ in range(max(1, round(load_ms / (self.sample_ms / self.replays)))):
            self.graph.replay()
        return statistics.median(self.sample_us() for _ in range(self.samples))


def captured(run: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """The function's graph, after two calls that compile and allocate."""
    run()
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def measure(replays: Mapping[str, Replays], protocol: Protocol) -> dict[str, Timing]:
    """Every function's time: burst samples of all in turn, then each under load."""
    bursts: dict[str, list[float]] = {name: [] for name in replays}
    for round_ in range(protocol.samples):
        for name, entry in replays.items():
            if round_ < entry.samples:
                time.sleep(min(max(protocol.rest_ms, 2 * entry.sample_ms), protocol.most_rest_ms) / 1e3)
                bursts[name].append(entry.sample_us())
    return {
        name: Timing(
            burst_us=round(statistics.median(bursts[name]), 2),
            sustained_us=round(entry.sustained_us(protocol.load_ms), 2),
        )
        for name, entry in replays.items()
    }


def eager_us(run: Callable[[], None], *, layers: int, samples: int) -> float:
    """Host microseconds a layer, from the first call to the end of the last on the device."""
    found = []
    for sample in range(samples + 3):
        torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        torch.cuda.synchronize()
        if sample >= 3:
            found.append((time.perf_counter() - start) * 1e6 / layers)
    return round(statistics.median(found), 2)


class TimeLimit:
    """When a run has to end: its points are of known length only once some were measured.

    Args:
        seconds: from now on; no limit if None.
    """

    def __init__(self, seconds: float | None) -> None:
        self.seconds = seconds
        self.start = time.perf_counter()

    @property
    def spent_s(self) -> float:
        """Since the start."""
        return time.perf_counter() - self.start

    @property
    def left_s(self) -> float | None:
        """Until the end, 0 after it; None without a limit."""
        return None if self.seconds is None else max(0.0, self.seconds - self.spent_s)

    def allows(self, expected_s: float) -> bool:
        """Whether a step that takes about so long still ends in time."""
        return self.left_s is None or expected_s < self.left_s


@contextmanager
def watched(what: str, *, seconds: float) -> Iterator[None]:
    """Ends the process, saying where it is, if the block takes longer: a kernel that hangs costs no more."""
    timer = threading.Timer(seconds, _give_up, (what, seconds))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _give_up(what: str, seconds: float) -> None:
    print(f"{what}: no end after {seconds:.0f} s", file=sys.stderr, flush=True)
    faulthandler.dump_traceback()
    os._exit(3)


def measure_ceilings() -> Ceilings:
    """A copy and a sum of 2 GiB, and a bf16 product of 8192 x 8192 matrices, each over 0.1 s of load."""
    source = torch.randint(-(2**31), 2**31, (COPY_BYTES // 4,), dtype=torch.int32, device="cuda")
    target, numbers = torch.empty_like(source), torch.rand(COPY_BYTES // 4, device="cuda")
    copy_s = _loaded_seconds(lambda: target.copy_(source))
    read_s = _loaded_seconds(lambda: numbers.sum())
    a, b = (torch.randn(MATMUL_SIZE, MATMUL_SIZE, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return Ceilings(
        copy_bytes_per_s=2 * COPY_BYTES / copy_s,
        read_bytes_per_s=COPY_BYTES / read_s,
        matmul_flops_per_s=2 * MATMUL_SIZE**3 / _loaded_seconds(lambda: a @ b),
    )


def _loaded_seconds(run: Callable[[], object], *, load_s: float = 0.025, span_s: float = 0.1) -> float:
    """The median time of a call, back to back after some load."""
    start = time.perf_counter()
    while time.perf_counter() - start < load_s:
        run()
        torch.cuda.synchronize()
    events = []
    start = time.perf_counter()
    while time.perf_counter() - start < span_s:
        pair = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        torch.cuda._sleep(SPIN_CYCLES)
        pair[0].record()
        run()
        pair[1].record()
        pair[1].synchronize()
        events.append(pair)
    return statistics.median(first.elapsed_time(second) for first, second in events) / 1e3
