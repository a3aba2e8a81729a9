"""Every instruction set and the torch path, against an oracle that places one value after the other."""

import os
import threading
import time
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from marlin_moe.kernels.errors import LayoutError
from marlin_moe.repack.native.path import load_extension
from marlin_moe.repack.native.repack_weights import repack_weights, run_c_loop, unpack_weights
from oracle_marlin import marlin_qweight

EXTENSION = load_extension()
VARIANTS = [] if isinstance(EXTENSION, str) else EXTENSION.variants()
PATHS = ["torch", *VARIANTS]
GUARD = 0x5A5A5A5A


@pytest.fixture(autouse=True)
def threads_restored() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def random_words(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**31), 2**31, shape, dtype=torch.int32, generator=generator)


def expected_qweight(weight_packed: torch.Tensor, bits: int) -> torch.Tensor:
    """The oracle's [B, K/16, N*bits/2]; values are the words' bytes, or the halves of these, low first."""
    values = weight_packed.contiguous().view(torch.uint8)
    if bits == 4:
        values = torch.stack((values & 15, values >> 4), dim=-1).flatten(-2)
    return torch.stack([marlin_qweight(matrix, bits) for matrix in values])


def fill(path: str, weight_packed: torch.Tensor, out: torch.Tensor, bits: int) -> None:
    if path == "torch":
        with pytest.MonkeyPatch.context() as environment:
            environment.setenv("MARLIN_MOE_NATIVE", "0")
            assert repack_weights(weight_packed, bits=bits, out=out) is out
    else:
        run_c_loop(weight_packed, out, bits=bits, variant=path)


def assert_same(actual: torch.Tensor, expected: torch.Tensor, problem: object) -> None:
    assert actual.shape == expected.shape, problem
    if not torch.equal(actual, expected):
        first = tuple((actual != expected).nonzero()[0].tolist())
        got, wanted = int(actual[first]) & 0xFFFFFFFF, int(expected[first]) & 0xFFFFFFFF
        raise AssertionError(
            f"{problem}: first difference at {first}: got {got:#010x}, expected {wanted:#010x}"
        )


def test_a_processor_has_its_variants() -> None:
    if isinstance(EXTENSION, str):
        pytest.skip(EXTENSION)
    assert VARIANTS[-1] == "scalar"
    assert len(set(VARIANTS)) == len(VARIANTS)
    if os.uname().machine in ("x86_64", "aarch64"):
        assert len(VARIANTS) >= 2


@pytest.mark.parametrize("k", [16, 32, 48, 80, 112, 128, 144, 272, 2048, 2064])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("path", PATHS)
def test_bytes_of_the_oracle(path: str, bits: int, k: int) -> None:
    for experts, n in ((1, 64), (3, 128), (2, 320)):
        weight_packed = random_words(experts, n, k * bits // 32, seed=k)
        before = weight_packed.clone()
        out = torch.full((experts, k // 16, n * bits // 2), GUARD, dtype=torch.int32)
        fill(path, weight_packed, out, bits)
        assert_same(out, expected_qweight(before, bits), (path, bits, experts, n, k))
        assert torch.equal(weight_packed, before)


@settings(max_examples=60, deadline=None)
@given(
    bits=st.sampled_from([4, 8]),
    experts=st.integers(1, 5),
    column_blocks=st.integers(1, 3),
    rows=st.integers(1, 40),
    skipped=st.tuples(st.integers(0, 2), st.integers(0, 70), st.integers(0, 9)),
    step=st.integers(1, 2),
    margins=st.tuples(st.integers(0, 2), st.integers(0, 2), st.integers(0, 17)),
)
def test_slices_of_larger_tensors(
    bits: int,
    experts: int,
    column_blocks: int,
    rows: int,
    skipped: tuple[int, int, int],
    step: int,
    margins: tuple[int, int, int],
) -> None:
    """Source and destination are views, of any strides and alignment, and nothing around them changes."""
    n, words = 64 * column_blocks, rows * bits // 2
    taken = (experts * step, n * step, words)
    whole = random_words(*with_margins(taken, skipped))
    weight_packed = cut(whole, skipped, taken)[::step, ::step]
    before = whole.clone()
    expected = expected_qweight(weight_packed, bits)
    shape = (experts, rows, n * bits // 2)
    around = torch.full(with_margins(shape, margins), GUARD, dtype=torch.int32)
    untouched = around.clone()
    cut(untouched, margins, shape).copy_(expected)
    for path in PATHS:
        around.fill_(GUARD)
        fill(path, weight_packed, cut(around, margins, shape), bits)
        assert_same(around, untouched, (path, bits, experts, n, rows, skipped, step, margins))
    assert torch.equal(whole, before)


def with_margins(shape: tuple[int, ...], margins: tuple[int, ...]) -> list[int]:
    return [size + 2 * margin for size, margin in zip(shape, margins, strict=True)]


def cut(tensor: torch.Tensor, start: tuple[int, ...], shape: tuple[int, ...]) -> torch.Tensor:
    return tensor[tuple(slice(first, first + size) for first, size in zip(start, shape, strict=True))]


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("path", VARIANTS)
def test_threads_give_the_same_bytes(path: str, bits: int, threads: int) -> None:
    weight_packed = random_words(5, 512, 2064 * bits // 32)
    assert weight_packed.nbytes > 2 << 20, "too small for a second and third thread"
    torch.set_num_threads(threads)
    out = weight_packed.new_empty(5, 129, 512 * bits // 2)
    fill(path, weight_packed, out, bits)
    assert_same(out, expected_qweight(weight_packed, bits), (path, bits, threads))


@pytest.mark.skipif(not VARIANTS or not os.path.isdir("/proc/self/task"), reason="the C loop on Linux")
def test_threads_run_and_the_interpreter_too() -> None:
    """While the loop runs, this thread's interpreter lock is free and two more threads exist."""
    weight_packed = random_words(32, 512, 512)
    out = torch.empty(32, 256, 1024, dtype=torch.int32)
    seen: list[tuple[float, int]] = []
    stop = threading.Event()

    def watch() -> None:
        while not stop.is_set():
            seen.append((time.perf_counter(), len(os.listdir("/proc/self/task"))))
            time.sleep(0.0002)

    def most_threads_seen(start: float, end: float) -> int:
        margin = (end - start) / 4  # what is seen at the edges may be from before or after the loop
        return max((count for at, count in seen if start + margin < at < end - margin), default=0)

    watcher = threading.Thread(target=watch)
    watcher.start()
    torch.set_num_threads(3)
    expected, most = len(os.listdir("/proc/self/task")) + 2, 0
    try:
        for _ in range(50):  # on a busy machine the watcher may miss some
            start = time.perf_counter()
            run_c_loop(weight_packed, out, bits=4, variant="scalar")
            most = max(most, most_threads_seen(start, time.perf_counter()))
            if most >= expected:
                break
    finally:
        stop.set()
        watcher.join()
    assert most >= expected, f"expected {expected} threads in the middle of a run, saw at most {most}"


@pytest.mark.skipif(not VARIANTS, reason="needs the C loop")
def test_unknown_variant_is_refused() -> None:
    weight_packed = random_words(1, 64, 2)
    with pytest.raises(ValueError, match="has no 'mmx'"):
        run_c_loop(weight_packed, torch.empty(1, 1, 128, dtype=torch.int32), bits=4, variant="mmx")


@pytest.mark.parametrize("bits", [4, 8])
def test_allocates_out(bits: int) -> None:
    weight_packed = random_words(2, 64, 32 * bits // 32)
    assert_same(repack_weights(weight_packed, bits=bits), expected_qweight(weight_packed, bits), bits)


def test_other_devices_take_the_torch_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MARLIN_MOE_NATIVE", "1")
    out = repack_weights(torch.empty(2, 128, 8, dtype=torch.int32, device="meta"), bits=4)
    assert (out.device.type, tuple(out.shape), out.dtype) == ("meta", (2, 4, 256), torch.int32)


def test_no_experts() -> None:
    out = torch.empty(0, 2, 128, dtype=torch.int32)
    assert repack_weights(torch.empty(0, 64, 4, dtype=torch.int32), bits=4, out=out) is out


@pytest.mark.parametrize(
    ("weight_packed", "bits", "message"),
    [
        (random_words(1, 64, 2).long(), 4, r"weight_packed: expected int32 .* got torch\.int64"),
        (random_words(1, 64, 2), 3, r"expected bits to be 4 or 8.* got 3"),
        (random_words(1, 96, 2), 4, r"N to be a multiple of 64.* got N=96"),
        (random_words(1, 64, 3), 4, r"K of 16.* K=24"),
        (random_words(1, 64, 6), 8, r"K of 16.* K=24"),
        (random_words(64, 2), 4, r"weight_packed: expected \[experts, N, .*\(64, 2\)"),
        (
            random_words(1, 2, 64).mT,
            4,
            r"weight_packed: .* contiguous last dimension.* strides \(128, 1, 64\)",
        ),
    ],
)
def test_sources_that_are_refused(weight_packed: torch.Tensor, bits: int, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        repack_weights(weight_packed, bits=bits)


@pytest.mark.parametrize(
    ("out", "message"),
    [
        (
            torch.empty(2, 2, 129, dtype=torch.int32),
            r"out: expected int32 \(2, 2, 128\).* got .*\(2, 2, 129\)",
        ),
        (torch.empty(2, 2, 128), r"out: expected int32 .* got torch\.float32"),
        (torch.empty(2, 2, 128, dtype=torch.int32, device="meta"), r"out: expected .* on cpu.* on meta"),
        (torch.empty(2, 128, 2, dtype=torch.int32).mT, r"out: expected a contiguous last dimension"),
        (torch.empty(1, 2, 128, dtype=torch.int32).expand(2, 2, 128), r"rows that lie apart.*\(0, 128, 1\)"),
        (torch.empty(511, dtype=torch.int32).as_strided((2, 2, 128), (256, 127, 1)), r"rows that lie apart"),
    ],
)
def test_destinations_that_are_refused(out: torch.Tensor, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        repack_weights(random_words(2, 64, 4), bits=4, out=out)


def test_source_and_destination_must_lie_apart() -> None:
    memory = random_words(1023)
    weight_packed = memory[:512].view(2, 64, 4)
    before = memory.clone()
    with pytest.raises(LayoutError, match="out: expected memory apart from weight_packed"):
        repack_weights(weight_packed, bits=4, out=memory[511:].view(2, 2, 128))
    assert torch.equal(memory, before)
    neighbour = torch.cat((memory, memory[:1]))
    out = repack_weights(neighbour[:512].view(2, 64, 4), bits=4, out=neighbour[512:].view(2, 2, 128))
    assert_same(out, expected_qweight(weight_packed, 4), "side by side")


@pytest.mark.parametrize("path", PATHS)
def test_rows_of_experts_may_be_interleaved(path: str) -> None:
    """out[expert, row] and weight_packed[expert, column] with the expert as the faster stride."""
    weight_packed = random_words(64, 3, 6).transpose(0, 1)
    out = torch.empty(3, 3, 128, dtype=torch.int32).transpose(0, 1)
    assert repack_weights(weight_packed, bits=4, out=out) is out
    out.fill_(GUARD)
    fill(path, weight_packed, out, 4)
    assert_same(out, expected_qweight(weight_packed, 4), path)


@pytest.mark.parametrize("k", [16, 48, 128, 144, 2064])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("path", ["0", None])
def test_unpacking_is_the_inverse(
    monkeypatch: pytest.MonkeyPatch, path: str | None, bits: int, k: int
) -> None:
    if path is None:
        monkeypatch.delenv("MARLIN_MOE_NATIVE", raising=False)
    else:
        monkeypatch.setenv("MARLIN_MOE_NATIVE", path)
    for experts, n in ((1, 64), (3, 128), (2, 320)):
        words = random_words(experts, n, k * bits // 32, seed=k)
        qweight = expected_qweight(words, bits)
        assert_same(unpack_weights(qweight, bits=bits), words, (path, bits, k, n))
        apart = torch.full((experts, 2 * qweight.shape[1], qweight.shape[2]), GUARD, dtype=torch.int32)
        apart[:, ::2] = qweight
        assert_same(unpack_weights(apart[:, ::2], bits=bits), words, ("rows apart", path, bits, k, n))
