"""The workspace as a CPU shows it: planned, shared, at a constant address, freed with its last layer."""

import copy
import gc
import pickle
import threading
import weakref
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from marlin_moe import MarlinMoEError, MarlinMoELayer, Workspace, fused_marlin_moe, reserve
from marlin_moe.kernels.plan.problem import LayerFacts
from marlin_moe.kernels.plan.reference import plan_workspace
from marlin_moe.kernels.scratch import Lease, Registry, Scratch, StreamKey, registry
from random_layer import random_calls, random_layer
from tree import run_python


@pytest.fixture(autouse=True)
def nothing_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers that other tests still hold are not seen here."""
    fresh = Registry()
    monkeypatch.setattr(registry, "handles", fresh.handles)
    monkeypatch.setattr(registry, "scratches", fresh.scratches)


def call(layer: MarlinMoELayer, *, tokens: int = 3, top_k: int = 2, seed: int = 0) -> torch.Tensor:
    x, weights, ids = random_calls(seed, tokens, top_k, layer)
    return fused_marlin_moe(x, layer, weights, ids)


def planned_bytes(layer: MarlinMoELayer, rows: int) -> int:
    return plan_workspace(LayerFacts.of(layer), rows=rows).nbytes


def test_attaching_allocates_nothing() -> None:
    layer = random_layer(max_tokens=16, top_k=2)
    workspace = layer.workspace
    assert workspace is not None
    assert (workspace.nbytes, workspace.scratch, workspace.data_ptr()) == (0, None, None)
    assert len(registry.scratches) == 0
    assert workspace.plan is not None
    assert workspace.plan.rows == 32
    assert "max_tokens=16, top_k=2, nbytes=0" in repr(workspace)


def test_the_first_call_allocates_max_tokens_times_top_k_rows() -> None:
    layer = random_layer(max_tokens=16)
    assert layer.workspace.plan is None, "top_k is not known yet"
    call(layer, tokens=1, top_k=3)
    assert layer.workspace.plan.rows == 48
    assert layer.workspace.nbytes == layer.workspace.scratch.nbytes == planned_bytes(layer, 48)


def test_the_layers_top_k_comes_before_the_calls() -> None:
    layer = random_layer(max_tokens=16, top_k=4)
    call(layer, top_k=1)
    assert layer.workspace.plan.rows == 64


def test_no_tokens_allocate_nothing() -> None:
    layer = random_layer()
    assert call(layer, tokens=0).shape == (0, 128)
    assert layer.workspace.nbytes == 0


def test_address_and_size_stay() -> None:
    layer = random_layer(max_tokens=4)
    call(layer, tokens=1, top_k=1)
    address, nbytes = layer.workspace.data_ptr(), layer.workspace.nbytes
    assert address is not None
    for tokens, top_k in ((4, 1), (33, 4), (1, 2), (0, 1)):
        call(layer, tokens=tokens, top_k=top_k)
        layer.workspace.reset()
        assert (layer.workspace.data_ptr(), layer.workspace.nbytes) == (address, nbytes)


def test_layers_share_one_scratch_sized_for_the_largest() -> None:
    layers = [
        random_layer(n, num_experts=n, padded_intermediate_size=64 * n, max_tokens=8) for n in (1, 3, 2)
    ]
    for layer in layers:
        call(layer, top_k=2)
    assert len({layer.workspace.data_ptr() for layer in layers}) == 1
    assert len(registry.scratches) == 1
    assert {layer.workspace.nbytes for layer in layers} == {planned_bytes(layers[1], 16)}


def test_memory_does_not_grow_with_layers() -> None:
    layers = [random_layer(max_tokens=8)]
    call(layers[0])
    for _ in range(20):
        layers.append(random_layer(max_tokens=8))
        call(layers[-1])
    assert len(registry.scratches) == 1


def test_a_later_larger_layer_gets_a_new_one_beside_the_old() -> None:
    small = random_layer(max_tokens=8)
    before = call(small)
    address = small.workspace.data_ptr()
    large = random_layer(1, padded_intermediate_size=256, max_tokens=8)
    call(large)
    assert small.workspace.data_ptr() == address != large.workspace.data_ptr()
    assert torch.equal(call(small), before)
    assert small.workspace.data_ptr() == address, "a layer keeps what it uses"
    third = random_layer(2, padded_intermediate_size=128, max_tokens=8)
    call(third)
    assert third.workspace.data_ptr() == large.workspace.data_ptr(), "it fits there"
    assert len(registry.scratches) == 2


def test_a_dropped_layer_frees_its_scratch() -> None:
    first, second = random_layer(max_tokens=8), random_layer(1, max_tokens=8)
    call(first)
    call(second)
    scratch = weakref.ref(first.workspace.scratch)
    del first
    gc.collect()
    assert scratch() is not None, "the second layer uses it"
    assert len(registry.handles) == 1
    del second
    gc.collect()
    assert scratch() is None
    assert len(registry.handles) == len(registry.scratches) == 0


def test_dropping_needs_no_garbage_collector() -> None:
    layer = random_layer(max_tokens=8)
    call(layer)
    scratch = weakref.ref(layer.workspace.scratch)
    gc.disable()
    try:
        del layer
        assert scratch() is None
    finally:
        gc.enable()


def test_a_dropped_layer_does_not_size_the_next_scratch() -> None:
    large = random_layer(padded_intermediate_size=512, max_tokens=8)
    small = random_layer(1, max_tokens=8)
    del large
    gc.collect()
    call(small)
    assert small.workspace.nbytes == planned_bytes(small, 16)


def test_reset_waits_and_leaves_a_working_layer() -> None:
    layer = random_layer(max_tokens=8)
    before = call(layer)
    layer.workspace.scratch.fill_(0xFF)
    layer.workspace.reset()
    assert not layer.workspace.scratch.any()
    assert torch.equal(call(layer), before)


class Device:
    """Stands for a CUDA device: what its streams still had to do happens when someone waits for it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, layer: MarlinMoELayer) -> None:
        self.scratches: list[Scratch] = []
        self.cleared_at_the_waits: list[list[bool]] = []
        self.capturing = False
        self.workspace = Workspace(
            LayerFacts.of(layer), device=torch.device("cuda", 0), max_tokens=8, top_k=2
        )
        monkeypatch.setattr(torch.cuda, "synchronize", self.wait)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.capturing)
        plan = plan_workspace(self.workspace.facts, rows=16)
        for stream in (1, 2):
            scratch = Scratch(
                StreamKey(device=self.workspace.device, stream=stream),
                torch.full((plan.nbytes,), 255, dtype=torch.uint8),
            )
            self.scratches.append(scratch)
            for backend in ("cuda", "reference"):
                self.workspace._leases[backend, stream] = Lease.lay_over(scratch, plan)

    def wait(self, device: torch.device) -> None:
        assert device == self.workspace.device
        assert any(scratch.lock.locked() for scratch in self.scratches), "no other call starts meanwhile"
        self.cleared_at_the_waits.append([not scratch.bytes.any() for scratch in self.scratches])


def test_reset_waits_for_the_device_before_and_after(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch, random_layer())
    device.workspace.reset()
    assert device.cleared_at_the_waits == [[False, False], [True, False], [True, False], [True, True]]
    assert not any(scratch.lock.locked() for scratch in device.scratches)


def test_reset_is_refused_inside_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch, random_layer())
    device.capturing = True
    with pytest.raises(MarlinMoEError, match=r"workspace\.reset: expected no capture, .* being captured"):
        device.workspace.reset()
    assert device.cleared_at_the_waits == []
    assert all(scratch.bytes.all() for scratch in device.scratches)


def test_reset_after_a_fault_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch, random_layer())

    def fail(_: torch.device) -> None:
        raise RuntimeError("CUDA error: an illegal memory access")

    monkeypatch.setattr(torch.cuda, "synchronize", fail)
    with pytest.raises(MarlinMoEError, match=r"workspace\.reset: .*cuda:0 .*illegal .* new process helps"):
        device.workspace.reset()
    assert not any(scratch.lock.locked() for scratch in device.scratches)


def test_a_call_that_fails_inside_leaves_the_workspace_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = random_layer(max_tokens=8)
    before = call(layer)
    with monkeypatch.context() as patch:
        patch.setattr("marlin_moe.kernels.backends.reference.weighted_sum", lambda *_: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            call(layer)
    assert torch.equal(call(layer), before)


class TestReserve:
    def test_of_a_layer(self) -> None:
        layer = random_layer(max_tokens=8, top_k=2)
        assert layer.workspace.reserve() == layer.workspace.nbytes == planned_bytes(layer, 16)
        address = layer.workspace.data_ptr()
        call(layer)
        assert layer.workspace.data_ptr() == address
        assert layer.workspace.reserve() == layer.workspace.nbytes, "again is fine"

    def test_of_a_layer_with_another_top_k(self) -> None:
        layer = random_layer(max_tokens=8, top_k=2)
        layer.workspace.reserve(top_k=5)
        assert layer.workspace.plan.rows == 40

    def test_of_a_layer_without_top_k(self) -> None:
        layer = random_layer(max_tokens=8)
        with pytest.raises(MarlinMoEError, match=r"workspace.reserve: expected top_k, .* got None"):
            layer.workspace.reserve()
        assert layer.workspace.reserve(top_k=2) == planned_bytes(layer, 16)

    def test_of_a_device(self) -> None:
        layers = [random_layer(n, padded_intermediate_size=64 * n, max_tokens=8) for n in (1, 4, 2)]
        assert reserve("cpu", max_tokens=32, top_k=2) == planned_bytes(layers[1], 64)
        assert len(registry.scratches) == 1
        assert {layer.workspace.plan.rows for layer in layers} == {64}
        addresses = [layer.workspace.data_ptr() for layer in layers]
        for layer in layers:
            call(layer, tokens=40)
        assert [layer.workspace.data_ptr() for layer in layers] == addresses

    def test_never_grows(self) -> None:
        layer = random_layer(max_tokens=8)
        call(layer, top_k=2)
        assert reserve(torch.device("cpu"), max_tokens=8, top_k=2) == layer.workspace.nbytes
        message = r"max_tokens x top_k = 18 rows, got 16 .*E=5, H=128, Ip=64.*never grows"
        with pytest.raises(MarlinMoEError, match=message):
            reserve("cpu", max_tokens=9, top_k=2)
        with pytest.raises(MarlinMoEError, match=r"= 24 rows, got 16"):
            layer.workspace.reserve(top_k=3)

    def test_of_a_device_without_layers(self) -> None:
        with pytest.raises(MarlinMoEError, match=r"reserve: expected layers on cpu, .*got none"):
            reserve("cpu", max_tokens=1, top_k=1)

    @pytest.mark.parametrize(
        ("max_tokens", "top_k", "error", "message"),
        [
            (0, 1, MarlinMoEError, r"max_tokens: expected at least 1, got 0"),
            (1, -1, MarlinMoEError, r"top_k: expected at least 1, got -1"),
            (1.5, 1, TypeError, r"max_tokens: expected an int, got float 1.5"),
            (1, True, TypeError, r"top_k: expected an int, got bool True"),
        ],
    )
    def test_wrong_numbers(self, max_tokens: int, top_k: int, error: type[Exception], message: str) -> None:
        random_layer()
        with pytest.raises(error, match=message):
            reserve("cpu", max_tokens=max_tokens, top_k=top_k)


def test_no_memory_says_what_was_asked_for() -> None:
    small = LayerFacts.of(random_layer())
    wide = replace(small, w13=replace(small.w13, size_n=2**22), w2=replace(small.w2, size_k=2**21))
    workspace = Workspace(wide, device=torch.device("cpu"), max_tokens=2**31, top_k=1)
    message = r"workspace on cpu: expected [\d,]{20,} bytes for the largest (?s:.*)smaller max_tokens"
    with pytest.raises(MarlinMoEError, match=message):
        workspace.reserve()
    assert workspace.nbytes == 0


def test_a_copy_has_a_workspace_of_its_own() -> None:
    layer = random_layer(max_tokens=8, top_k=2)
    before = call(layer)
    copies = [copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))]
    for other in copies:
        assert other.workspace is not layer.workspace
        assert other.workspace.nbytes == 0
        assert other.workspace.facts == layer.workspace.facts
        assert (other.workspace.max_tokens, other.workspace.top_k) == (8, 2)
        assert torch.equal(call(other), before)
        assert other.workspace.data_ptr() == layer.workspace.data_ptr(), "found again through the device"


def test_first_call_in_inference_mode_serves_later_ones_outside() -> None:
    layer = random_layer(max_tokens=8)
    with torch.inference_mode():
        inside = call(layer)
    assert torch.equal(call(layer), inside)
    layer.workspace.reset()


def run_together(count: int, work: Callable[[int], None]) -> None:
    """work(0) ... work(count - 1), each in a thread of its own, started at the same moment."""
    start = threading.Barrier(count)

    def started(number: int) -> None:
        start.wait()
        work(number)

    threads = [threading.Thread(target=started, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_threads_on_one_scratch() -> None:
    layers = [random_layer(n, max_tokens=8) for n in range(2)]
    expected = [[call(layer, tokens=9, seed=seed) for seed in range(5)] for layer in layers]
    wrong: list[tuple[int, int]] = []

    def work(number: int) -> None:
        which = number % 2
        for seed in [0, 1, 2, 3, 4] * 2:
            if not torch.equal(call(layers[which], tokens=9, seed=seed), expected[which][seed]):
                wrong.append((which, seed))

    run_together(4, work)
    assert layers[0].workspace.data_ptr() == layers[1].workspace.data_ptr()
    assert wrong == []


def test_threads_that_call_first_at_once_get_one_scratch() -> None:
    for seed in range(10):
        layer = random_layer(seed, max_tokens=8)
        addresses: list[int | None] = []

        def work(_: int, layer: MarlinMoELayer = layer, found: list[int | None] = addresses) -> None:
            call(layer, tokens=1)
            found.append(layer.workspace.data_ptr())

        run_together(3, work)
        assert addresses == [layer.workspace.data_ptr()] * 3
        assert len(registry.scratches) == 1
        del layer, work
        gc.collect()


FORK = """
import os, sys, threading
sys.path.insert(0, "tests/support")
from random_layer import random_layer
from marlin_moe.kernels.scratch import registry

layer = random_layer(max_tokens=8, top_k=2)
held, done = threading.Event(), threading.Event()

def hold():
    with registry.lock, layer.workspace.lease(top_k=2):
        held.set()
        done.wait()

thread = threading.Thread(target=hold)
thread.start()
held.wait()
child = os.fork()
if child == 0:
    with layer.workspace.lease(top_k=2) as lease:
        lease.buffers["w2_output"].fill_(1)
    random_layer(1)
    os._exit(7)
status = os.waitpid(child, 0)[1]
done.set()
thread.join()
print("child", os.waitstatus_to_exitcode(status))
"""


def test_a_forked_child_is_not_locked_out() -> None:
    result = run_python("-c", FORK)
    assert result.stdout.strip() == "child 7", result.stderr
