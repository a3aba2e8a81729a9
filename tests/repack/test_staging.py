"""Reading ahead on lanes: order, how far ahead, errors, and the same layers as without."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
import torch

from checkpoints import CheckpointSpec, write_checkpoint
from compare_layer import equal_bytes, same_layer
from marlin_moe import Shard, load_layers, repack_checkpoint
from marlin_moe.repack import blocks
from marlin_moe.repack.blocks import TensorSpec
from marlin_moe.repack.errors import CheckpointError, ExpertsError
from marlin_moe.repack.packed.block_memory import BlockMemory
from marlin_moe.repack.staging import lane_count, make_lanes, read_ahead
from marlin_moe.repack.tensor_file import TensorFile
from mutations import replace_tensor

SPEC = CheckpointSpec(num_experts=7, hidden_size=64, intermediate_size=192, symmetric=False, group_size=32)


class CpuLane:
    """A lane without a GPU; notes that one thread at a time has it."""

    def __init__(self) -> None:
        self.busy = False
        self.blocks = 0

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        assert self.busy
        return torch.empty(shape, dtype=dtype)

    @contextmanager
    def work(self) -> Iterator[None]:
        assert not self.busy
        self.busy, self.blocks = True, self.blocks + 1
        try:
            yield
        finally:
            self.busy = False


@pytest.fixture
def lanes(monkeypatch: pytest.MonkeyPatch) -> list[CpuLane]:
    """Loading on a CPU as it is for a GPU, one expert a block."""
    made: list[CpuLane] = []

    def make(device: torch.device, nbytes: int) -> list[CpuLane]:
        assert nbytes > 0
        made.extend(CpuLane() for _ in range(3))
        return made[-3:]

    monkeypatch.setattr(blocks, "make_lanes", make)
    monkeypatch.setattr(blocks, "lane_count", lambda device: 1 << 40)
    monkeypatch.setattr(blocks, "hand_over", lambda tensors, device: None)
    return made


def test_a_cpu_has_no_lanes() -> None:
    assert lane_count(torch.device("cpu")) == lane_count(torch.device("meta")) == 0
    assert make_lanes(torch.device("cpu"), 1 << 40) == ()
    caller = threading.get_ident()
    found = read_ahead(range(3), lambda item, lane: (item, lane, threading.get_ident()), ())
    assert list(found) == [(i, None, caller) for i in range(3)]


def test_a_cuda_device_has_two_to_four(monkeypatch: pytest.MonkeyPatch) -> None:
    for threads, count in ((1, 2), (3, 3), (64, 4)):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        assert lane_count(torch.device("cuda")) == count


def test_results_come_in_order_from_all_lanes_at_once() -> None:
    lanes = [CpuLane() for _ in range(3)]
    meeting = threading.Barrier(3, timeout=30)

    def read(item: int, lane: object) -> int:
        meeting.wait()  # three at a time, or the barrier breaks
        return item * item

    assert list(read_ahead(range(12), read, lanes)) == [item * item for item in range(12)]
    assert sum(lane.blocks for lane in lanes) == 12


def test_no_more_is_begun_than_the_lanes_and_one_hold() -> None:
    begun: list[int] = []

    def read(item: int, lane: object) -> int:
        begun.append(item)
        return item

    with closing(read_ahead(range(100), read, [CpuLane(), CpuLane()])) as results:
        for result in results:
            assert max(begun) <= result + 3
            if result == 10:
                break
    assert max(begun) <= 13


def test_an_error_comes_in_its_turn_and_ends_the_threads() -> None:
    before = threading.active_count()

    def read(item: int, lane: object) -> int:
        if item >= 2:
            raise CheckpointError(f"item {item}")
        return item

    results = read_ahead(range(50), read, [CpuLane() for _ in range(4)])
    assert [next(results), next(results)] == [0, 1]
    with pytest.raises(CheckpointError, match="item 2"):
        next(results)
    assert threading.active_count() == before


@pytest.mark.parametrize("rank", [{}, {"tp": Shard(1, 3), "ep": Shard(1, 2)}, {"tp": Shard(1, 2)}], ids=str)
@pytest.mark.filterwarnings("ignore:.*do not all fall on 64")
def test_layers_are_the_same(tmp_path: Path, lanes: list[CpuLane], rank: dict[str, Shard]) -> None:
    """From a source and from a packed checkpoint, cut and not cut."""
    write_checkpoint(tmp_path / "source", SPEC)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(blocks, "lane_count", lambda device: 0)
        patched.setattr(blocks, "make_lanes", lambda device, nbytes: ())
        expected = load_layers(tmp_path / "source", **rank)  # type: ignore[arg-type]
        repack_checkpoint(tmp_path / "source", tmp_path / "packed")
    assert not lanes
    for folder in ("source", "packed"):
        for name, layer in load_layers(tmp_path / folder, **rank).items():  # type: ignore[arg-type]
            same_layer(layer, expected[name])
        mapped = folder == "packed" and not rank  # whole, and on a CPU: nothing is read
        assert sum(lane.blocks for lane in lanes) == (0 if mapped else expected[name].num_experts)
        lanes.clear()


def test_a_repack_writes_the_same_files(tmp_path: Path, lanes: list[CpuLane]) -> None:
    write_checkpoint(tmp_path / "source", SPEC)
    repack_checkpoint(tmp_path / "source", tmp_path / "ahead")
    assert sum(lane.blocks for lane in lanes) == 7
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(blocks, "lane_count", lambda device: 0)
        patched.setattr(blocks, "make_lanes", lambda device, nbytes: ())
        repack_checkpoint(tmp_path / "source", tmp_path / "plain")
    names = sorted(path.name for path in (tmp_path / "plain").iterdir())
    assert names == sorted(path.name for path in (tmp_path / "ahead").iterdir())
    for name in names:
        assert (tmp_path / "plain" / name).read_bytes() == (tmp_path / "ahead" / name).read_bytes(), name


def test_problems_of_all_blocks_in_their_order(tmp_path: Path, lanes: list[CpuLane]) -> None:
    write_checkpoint(tmp_path, SPEC)
    names = [f"model.layers.0.mlp.experts.{e}.up_proj.weight_scale" for e in (1, 4, 6)]
    for name in names:
        replace_tensor(tmp_path, name, torch.zeros_like)
    with pytest.raises(ExpertsError) as caught:
        load_layers(tmp_path)
    lines = str(caught.value).splitlines()[1:]
    assert [line.partition(":")[0] for line in lines] == names
    assert load_layers(tmp_path, allow_dead_experts=True)


def test_a_read_that_fails_is_the_loads_error(
    tmp_path: Path, lanes: list[CpuLane], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_checkpoint(tmp_path, SPEC)
    read = TensorFile.read_bytes

    def fail(self: TensorFile, offset: int, buffer: memoryview, *, what: str) -> None:
        if ".5.down_proj" in what:
            raise CheckpointError(f"{what}: reading failed")
        read(self, offset, buffer, what=what)

    monkeypatch.setattr(TensorFile, "read_bytes", fail)
    before = threading.active_count()
    with pytest.raises(CheckpointError, match=r"experts\.5\.down_proj.*reading failed"):
        load_layers(tmp_path)
    assert threading.active_count() == before


def test_block_memory_on_a_cpu_is_reused_and_written_at_once() -> None:
    written: list[torch.Tensor] = []
    specs = {"a": TensorSpec(dtype=torch.int32, shape=(5, 3))}
    memory = BlockMemory(specs, torch.device("cpu"), lambda results: written.append(results["a"].clone()))
    first = memory.take(2)["a"].fill_(1)
    memory.commit(2)
    second = memory.take(1)["a"].fill_(2)
    assert second.data_ptr() == first.data_ptr()
    memory.commit(1)
    memory.drain()
    memory.close()
    for got, expected in zip(written, (torch.full((2, 3), 1), torch.full((1, 3), 2)), strict=True):
        equal_bytes(got, expected.int(), "a")
