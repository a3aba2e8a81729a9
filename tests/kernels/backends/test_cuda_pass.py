"""What the kernels of each path are handed in each pass, seen by functions in their place, without a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from marlin_moe import Activation, MarlinMoELayer
from marlin_moe.kernels.arguments import MoEArguments
from marlin_moe.kernels.backends import cuda_arguments, cuda_moe, prefill, prefill_arguments
from marlin_moe.kernels.backends.prefill_arguments import (
    DIRECT,
    MAP_BYTES,
    NO_MAP,
    OUT_ALIGNED,
    Box,
    weight_maps,
)
from marlin_moe.kernels.call import ReadyCall
from marlin_moe.kernels.errors import WorkspaceError
from marlin_moe.kernels.plan import cuda_moe as planner
from marlin_moe.kernels.plan.paths import Path, choose_path
from marlin_moe.kernels.plan.problem import LayerFacts
from marlin_moe.kernels.scratch import Lease, Scratch, StreamKey
from random_layer import random_calls, random_layer

STREAM, DEVICE = 77, torch.device("cpu")
ALIGNED_TO = 64  # the GEMMs' maps, behind 248 bytes of arguments
GEMM_BYTES = 256 + 4 * MAP_BYTES


@dataclass(frozen=True, slots=True)
class Kernel:
    """A launch that is only written down."""

    name: str
    parameter_bytes: int
    launches: list[tuple[str, bytes]]

    def __call__(self, stream: int, parameters: bytes) -> None:
        assert stream == STREAM
        assert len(parameters) == self.parameter_bytes, self.name
        self.launches.append((self.name, bytes(parameters)))


@dataclass(frozen=True, slots=True)
class Device:
    """An H200 that runs nothing."""

    launches: list[tuple[str, bytes]] = field(default_factory=list)
    boxes: dict[bytes, Box] = field(default_factory=dict)

    def kernel(self, name: str, parameter_bytes: int) -> Kernel:
        return Kernel(name, parameter_bytes, self.launches)

    def tensor_map(self, box: Box) -> bytes:
        encoded = f"map {len(self.boxes)}".encode().ljust(MAP_BYTES, b"\1")
        self.boxes[encoded] = box
        return encoded

    def arguments(self, number: int) -> tuple[Any, ...]:
        """What launch `number` was told, as numbers."""
        name, parameters = self.launches[number]
        layout = cuda_arguments.PARAMETERS if name in ("decode", "moe") else prefill_arguments.PARAMETERS
        return layout.unpack(parameters[: layout.size])

    def maps(self, number: int) -> list[Box | None]:
        """The maps of a GEMM's launch."""
        tail = self.launches[number][1][-4 * MAP_BYTES :]
        parts = [tail[start : start + MAP_BYTES] for start in range(0, len(tail), MAP_BYTES)]
        return [None if part == NO_MAP else self.boxes[part] for part in parts]


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    made = Device()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=STREAM))
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(cuda_moe, "architecture", lambda device: "sm_90a")
    monkeypatch.setattr(cuda_moe, "sm_count", lambda device: 132)
    one = cuda_arguments.PARAMETERS.size
    monkeypatch.setattr(cuda_moe, "prepared", lambda variant, *_: made.kernel(variant.kernel, one))
    ends = prefill_arguments.PARAMETERS.size
    kernels = prefill.PrefillLaunches(
        route=made.kernel("route", ends),
        first=made.kernel("first", GEMM_BYTES),
        second=made.kernel("second", GEMM_BYTES),
    )
    monkeypatch.setattr(prefill, "prepared", lambda variant, device: kernels)
    monkeypatch.setattr(
        prefill, "prepared_sum", lambda dtype, hidden, tokens, device: made.kernel(f"sum of {tokens}", ends)
    )
    monkeypatch.setattr(prefill_arguments, "tensor_map", made.tensor_map)
    caches = (prefill_arguments._weight_maps, prefill_arguments.activations_map)
    for cache in caches:
        cache.cache_clear()
    yield made
    for cache in caches:
        cache.cache_clear()


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A call of a layer on a CPU, its result, and scratch as on an H200."""

    arguments: MoEArguments
    out: torch.Tensor
    lease: Lease

    @classmethod
    def of(cls, layer: MarlinMoELayer, *, tokens: int, top_k: int, planned: int | None = None) -> Call:
        x, weights, ids = random_calls(0, tokens, top_k, layer, dtype=torch.bfloat16)
        facts, rows = LayerFacts.of(layer), tokens * top_k if planned is None else planned
        plan = planner.plan_workspace(facts, rows=rows, blocks=264, arch="sm_90a")
        scratch = Scratch(StreamKey.current(DEVICE), torch.empty(plan.nbytes, dtype=torch.uint8))
        arguments = MoEArguments(
            x=x,
            layer=layer,
            topk_weights=weights,
            topk_ids=ids,
            activation=Activation("silu"),
            apply_router_weight_on_input=False,
            routed_scaling_factor=2.5,
            expert_map=layer.expert_map,
            out=None,
        )
        return cls(arguments=arguments, out=torch.empty_like(x), lease=Lease.lay_over(scratch, plan))

    def run(self) -> None:
        cuda_moe.run(self.arguments, self.out, self.lease)

    def path(self, rows: int) -> Path:
        return choose_path(self.arguments.workspace().facts, rows=rows, arch="sm_90a")

    def pointers(self, start: int) -> tuple[int, ...]:
        """x, weights, ids and map of the tokens from `start` on."""
        a = self.arguments
        tensors = (a.x, a.topk_weights, a.topk_ids)
        return (*(tensor[start:].data_ptr() for tensor in tensors), 0)


@pytest.mark.parametrize(
    ("path", "kernel", "tokens", "parts"), [(Path.DECODE, "decode", 7, 146), (Path.GENERAL, "moe", 50, 20)]
)
def test_few_rows_are_one_launch(device: Device, path: Path, kernel: str, tokens: int, parts: int) -> None:
    layer = random_layer(num_experts=3)
    call = Call.of(layer, tokens=tokens, top_k=2)
    assert call.path(2 * tokens) is path
    call.run()
    assert [name for name, _ in device.launches] == [kernel]
    found = device.arguments(0)
    assert found[:4] == call.pointers(0)
    assert found[4:14] == cuda_arguments.matrices_of(layer)
    assert found[14] == call.out.data_ptr()
    assert found[15:24] == tuple(call.lease.addresses[name] for name in cuda_arguments.SCRATCH)
    assert found[24:28] == (128, 128, tokens, 2)  # strides, tokens, top_k
    assert found[28:33] == (3, 3, 128, 64, cuda_arguments.KINDS.index("silu"))
    assert found[33:36] == (planner.split_capacity(264), parts, 2.5)


def test_many_rows_are_four_launches_with_the_same_arguments(device: Device) -> None:
    layer = random_layer()
    call = Call.of(layer, tokens=90, top_k=2)
    assert call.path(180) is Path.PREFILL
    call.run()
    assert [name for name, _ in device.launches] == ["route", "first", "second", "sum of 90"]
    size = prefill_arguments.PARAMETERS.size
    assert len({parameters[:size] for _, parameters in device.launches}) == 1
    found = device.arguments(0)
    assert found[:4] == call.pointers(0)
    assert found[4:14] == cuda_arguments.matrices_of(layer)
    assert found[14] == call.out.data_ptr()
    assert found[15:21] == tuple(call.lease.addresses[name] for name in prefill_arguments.SCRATCH)
    assert found[21:25] == (128, 128, 90, 2)
    assert found[25:30] == (5, 5, 128, 64, cuda_arguments.KINDS.index("silu"))
    tile = planner.choose_variant(LayerFacts.of(layer), rows=180, arch="sm_90a").tile
    flags = cuda_arguments.IDS64 | cuda_arguments.WEIGHTS_FP32 | OUT_ALIGNED
    assert found[30:34] == (tile.rows, tile.mask, flags, 2.5)


def test_the_gemms_are_told_where_weights_and_tokens_lie(device: Device) -> None:
    layer = random_layer(symmetric=False)
    call = Call.of(layer, tokens=90, top_k=2, planned=400)
    call.run()
    for number, matrix in ((1, layer.w13), (2, layer.w2)):
        words, scales, zeros, tokens = device.maps(number)
        assert [box and box.address for box in (words, scales, zeros)] == [
            *(matrix.qweight.data_ptr(), matrix.scales.data_ptr(), matrix.zero_points.data_ptr())
        ]
        assert words.shape == (5 * matrix.size_k // 16, matrix.size_n)
        parameters = device.launches[number][1]
        assert (len(parameters) - 4 * MAP_BYTES) % ALIGNED_TO == 0
        assert (tokens is None) == (number == 1)
    assert tokens.address == call.lease.addresses["activations"]
    assert tokens.shape == (400, 64), "all rows of the plan"


def test_one_slot_needs_no_sum(device: Device) -> None:
    call = Call.of(random_layer(num_experts=3), tokens=150, top_k=1)
    call.run()
    assert [name for name, _ in device.launches] == ["route", "first", "second"]
    assert device.arguments(0)[32] & (DIRECT | OUT_ALIGNED) == DIRECT | OUT_ALIGNED


def test_a_result_that_is_not_aligned_is_written_by_the_sum(device: Device) -> None:
    call = Call.of(random_layer(num_experts=3), tokens=150, top_k=1)
    around = torch.empty(150 * 128 + 1, dtype=torch.bfloat16)
    replace(call, out=around[1:].view(150, 128)).run()
    assert [name for name, _ in device.launches] == ["route", "first", "second", "sum of 150"]
    assert not device.arguments(0)[32] & (DIRECT | OUT_ALIGNED)


@pytest.mark.parametrize(
    ("planned", "starts", "name"),
    [(60, [0, 20, 40, 60, 80], "decode"), (110, [0, 36, 72], "moe"), (200, [0, 66], "route")],
)
def test_passes_follow_the_plan(device: Device, planned: int, starts: list[int], name: str) -> None:
    call = Call.of(random_layer(num_experts=3), tokens=90, top_k=3, planned=planned)
    call.run()
    passes = [number for number, (seen, _) in enumerate(device.launches) if seen == name]
    found = [device.arguments(number) for number in passes]
    place = 23 if name == "route" else 26
    sizes = [stop - start for start, stop in zip(starts, [*starts[1:], 90], strict=True)]
    assert [numbers[place] for numbers in found] == sizes
    assert [numbers[:4] for numbers in found] == [call.pointers(start) for start in starts]
    assert [numbers[14] for numbers in found] == [call.out[start:].data_ptr() for start in starts]
    sums = [seen for seen, _ in device.launches if seen.startswith("sum")]
    assert sums == ([f"sum of {size}" for size in sizes] if name == "route" else [])


def test_a_wide_x_takes_more_passes(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_moe, "most_tokens", lambda row_bytes: 1 + 10_000 // row_bytes)
    call = Call.of(random_layer(), tokens=90, top_k=2)
    call.run()
    sizes = [device.arguments(number)[23] for number in range(0, len(device.launches), 4)]
    assert sizes == [40, 40, 10]


def test_a_plan_without_room_for_a_token_is_an_error(device: Device) -> None:
    call = Call.of(random_layer(), tokens=1, top_k=8, planned=7)
    with pytest.raises(WorkspaceError, match="expected top_k = 8 rows or more"):
        call.run()


def test_maps_stay_over_new_weights_and_are_others_elsewhere(device: Device) -> None:
    layer, other = random_layer(), random_layer(seed=1)
    before = weight_maps(layer.w13)
    layer.update_(other)
    assert weight_maps(layer.w13) == before
    assert weight_maps(other.w13) != before
    assert weight_maps(layer.w2) != before
    made = len(device.boxes)
    assert weight_maps(layer.w13) == before
    assert len(device.boxes) == made, "found again"


@pytest.mark.parametrize("capturing", [False, True])
@pytest.mark.parametrize("tokens", [7, 90])
def test_a_call_made_ready_launches_the_same(
    device: Device, monkeypatch: pytest.MonkeyPatch, tokens: int, capturing: bool
) -> None:
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: STREAM, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: capturing, raising=False)
    call = Call.of(random_layer(), tokens=tokens, top_k=2, planned=400)
    a, rows = call.arguments, tokens * 2
    call.run()
    checked, device.launches[:] = list(device.launches), []
    ready = ReadyCall(
        launch=cuda_moe.ready_pass(a, call.out, cuda_moe.choose_variant(a, rows=rows), rows=rows),
        tokens=tokens,
        top_k=2,
        device_index=0,
    )
    leases = {False: call.lease, True: Call.of(a.layer, tokens=tokens, top_k=2).lease}
    workspace: Any = SimpleNamespace(
        bound=lambda backend, top_k: leases[False], captured=lambda backend, rows: leases[True]
    )
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda x, shape: call.out)
    assert ready.run(a.x, a.topk_weights, a.topk_ids, a.expert_map, workspace) is call.out
    monkeypatch.undo()
    assert [name for name, _ in device.launches] == [name for name, _ in checked]
    if not capturing:
        assert device.launches == checked
        return
    names = cuda_arguments.SCRATCH if tokens == 7 else prefill_arguments.SCRATCH
    addresses = tuple(leases[True].addresses[name] for name in names)
    assert device.arguments(0)[15 : 15 + len(names)] == addresses
    if tokens == 90:
        box = device.maps(2)[3]
        assert box is not None
        assert (box.address, box.shape[0]) == (leases[True].addresses["activations"], rows)
