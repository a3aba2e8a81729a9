"""One layer from several streams and threads at once: right, and without an end that does not come."""

import threading

import pytest
import torch

from child import in_child
from moe_cases import DenseMoE, MoECall, MoECase, check, make_call, make_layer

CALLS = 10_000
CASE = MoECase(tokens=90, num_experts=16, hidden_size=256, padded_intermediate_size=128, top_k=4)

pytestmark = pytest.mark.gpu


class Checked:
    """Calls of one layer with known answers; `wrong` counts, on the GPU, those that came out otherwise."""

    def __init__(self, sizes: tuple[int, ...] = (9, 1, 90, 7)) -> None:
        made = make_layer(CASE, "cuda")
        self.layer = made.layer
        whole, exact = make_call(CASE, made.layer), DenseMoE(made)
        self.calls: list[tuple[MoECall, torch.Tensor]] = []
        for tokens in sizes:
            call = whole.first(tokens)
            answer = call.run(self.layer)
            check(CASE, call, answer, exact(call))
            self.calls.append((call, answer))
        torch.cuda.synchronize()

    def repeat(self, count: int, start: int, wrong: torch.Tensor) -> None:
        """`count` calls on the current stream, beginning with the call number `start`."""
        for number in range(start, start + count):
            call, answer = self.calls[number % len(self.calls)]
            wrong.add_((call.run(self.layer) != answer).any())


def counters(count: int) -> list[torch.Tensor]:
    return [torch.zeros((), dtype=torch.int64, device="cuda") for _ in range(count)]


@in_child(timeout_s=180)
def test_one_thread_alternates_between_two_streams() -> None:
    checked, wrong = Checked(), counters(2)
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    for number in range(CALLS):
        for stream, counter in zip(streams, wrong, strict=True):
            with torch.cuda.stream(stream):
                checked.repeat(1, number, counter)
    torch.cuda.synchronize()
    assert [int(counter) for counter in wrong] == [0, 0]


@in_child(timeout_s=180)
def test_two_threads_on_a_stream_each() -> None:
    checked, wrong = Checked(), counters(2)
    errors: list[BaseException] = []

    def work(number: int) -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                checked.repeat(CALLS, number, wrong[number])
                torch.cuda.current_stream().synchronize()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors
    assert [int(counter) for counter in wrong] == [0, 0]


@in_child(timeout_s=180)
def test_resets_while_two_streams_are_busy() -> None:
    checked, wrong = Checked(), counters(2)
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    workspace = checked.layer.workspace
    assert workspace is not None
    for number in range(200):
        for stream, counter in zip(streams, wrong, strict=True):
            with torch.cuda.stream(stream):
                checked.repeat(5, number, counter)
        workspace.reset()
    torch.cuda.synchronize()
    assert [int(counter) for counter in wrong] == [0, 0]


@in_child(timeout_s=180)
def test_four_threads_on_one_stream() -> None:
    checked, wrong = Checked(), counters(4)
    stream = torch.cuda.Stream()

    def work(number: int) -> None:
        with torch.cuda.stream(stream):
            checked.repeat(CALLS // 4, number, wrong[number])

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.cuda.synchronize()
    assert [int(counter) for counter in wrong] == [0, 0, 0, 0]


@in_child(timeout_s=180)
def test_beside_other_kernels_that_fill_the_device() -> None:
    """A cooperative grid waits until all of it fits; it must neither starve nor block the others for good."""
    checked, wrong = Checked(), counters(1)
    other, square = torch.cuda.Stream(), torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    with torch.cuda.stream(other):
        for _ in range(200):
            square @ square
    checked.repeat(500, 0, wrong[0])
    with torch.cuda.stream(other):
        for _ in range(200):
            square @ square
    torch.cuda.synchronize()
    assert int(wrong[0]) == 0


def test_every_stream_has_its_own_scratch() -> None:
    made = make_layer(CASE, "cuda")
    call = make_call(CASE, made.layer)
    workspace = made.layer.workspace
    assert workspace is not None
    call.run(made.layer)
    first, nbytes = workspace.data_ptr(), workspace.nbytes
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        assert workspace.data_ptr() is None
        call.run(made.layer)
        second = workspace.data_ptr()
    stream.synchronize()
    assert second not in (None, first)
    assert workspace.nbytes > nbytes
    assert workspace.data_ptr() == first
