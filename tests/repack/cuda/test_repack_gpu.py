"""Repacking on a GPU gives the bytes of a CPU: the kernels, loading, and `repack --device cuda`."""

from __future__ import annotations

import shutil
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch

from checkpoints import CheckpointSpec, make_source, write_checkpoint
from compare_layer import equal_bytes, same_layer
from folders import checkpoint_folders, golden
from marlin_moe import MarlinMoELayer, QuantScheme, Shard, load_layers, process_weights, repack_checkpoint
from marlin_moe.kernels.layout import pack_qweight, pack_zero_points, permute_scales
from marlin_moe.repack import blocks, process
from marlin_moe.repack.errors import CheckpointError, ExpertsError, ShardError
from marlin_moe.repack.native import permute
from marlin_moe.repack.native.path import native_path
from marlin_moe.repack.native.repack_weights import repack_weights, unpack_weights
from marlin_moe.repack.packed import load as packed_load
from marlin_moe.repack.process import update_weights_
from marlin_moe.repack.tensor_file import TensorFile
from mutations import replace_tensor

pytestmark = pytest.mark.gpu

GUARD = 0x5A5A5A5A
RANKS = [
    {"tp": Shard(t, tp), "ep": Shard(e, ep)}
    for tp, ep in ((1, 1), (2, 1), (1, 2), (2, 2), (4, 1))
    for t, e in product(range(tp), range(ep))
]
SPECS = {
    "int4": CheckpointSpec(intermediate_size=256),
    "int4 g32 asymmetric": CheckpointSpec(intermediate_size=192, group_size=32, symmetric=False, bias=True),
    "int8 g64": CheckpointSpec(intermediate_size=128, bits=8, group_size=64, symmetric=False),
    "one scale per column": CheckpointSpec(intermediate_size=72, group_size=None, symmetric=False),
    "act-order, padded": CheckpointSpec(
        num_layers=2, intermediate_size=96, actorder="group", symmetric=False
    ),
    "w2 in 8 bits, fp16": CheckpointSpec(down_bits=8, down_group_size=64, dtype=torch.float16),
}
BLOCK_BYTES = 64 << 10  # several blocks, and lanes that are used again


@pytest.fixture(autouse=True)
def kernel_demanded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here may pass by the torch path."""
    monkeypatch.delenv("MARLIN_MOE_NATIVE", raising=False)
    assert native_path("cuda").used, native_path("cuda")


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few experts a block."""
    lane_blocks, plain_blocks = blocks.lane_blocks, blocks.blocks

    def small_lane_blocks(*args: object, block_bytes: int) -> object:
        return lane_blocks(*args, block_bytes=min(block_bytes, BLOCK_BYTES))  # type: ignore[arg-type]

    def small_plain_blocks(*args: object, block_bytes: int) -> object:
        return plain_blocks(*args, block_bytes=min(block_bytes, BLOCK_BYTES))  # type: ignore[arg-type]

    monkeypatch.setattr(blocks, "lane_blocks", small_lane_blocks)
    monkeypatch.setattr(blocks, "blocks", small_plain_blocks)
    monkeypatch.setattr(packed_load, "lane_blocks", small_lane_blocks)


def random_words(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**31), 2**31, shape, dtype=torch.int32, generator=generator)


def test_the_kernel_is_the_path_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    major, minor = torch.cuda.get_device_capability()
    assert str(native_path("cuda")).startswith(f"CUDA kernel (sm_{major}{minor}")
    monkeypatch.setenv("MARLIN_MOE_NATIVE", "0")
    assert str(native_path("cuda")) == "torch operations (MARLIN_MOE_NATIVE=0)"


@pytest.mark.parametrize("k", [16, 32, 48, 64, 80, 112, 128, 144, 256, 272, 768, 2048, 2064, 7168])
@pytest.mark.parametrize("bits", [4, 8])
def test_weights_and_back(bits: int, k: int) -> None:
    for experts, n in ((1, 64), (3, 128), (2, 320), (5, 1536)):
        weight_packed = random_words(experts, n, k * bits // 32, seed=k)
        expected = pack_qweight(weight_packed, bits=bits)
        on_device = weight_packed.cuda()
        out = torch.full(expected.shape, GUARD, dtype=torch.int32, device="cuda")
        assert repack_weights(on_device, bits=bits, out=out) is out
        what = f"{bits} bits, {experts} x {n} x {k}"
        equal_bytes(out, expected, what)
        equal_bytes(on_device, weight_packed, f"{what}: source")
        equal_bytes(unpack_weights(out, bits=bits), weight_packed, f"{what}: back")


@pytest.mark.parametrize("shift", [0, 1, 2, 4])
@pytest.mark.parametrize(("bits", "words"), [(4, 40), (4, 42), (8, 40), (8, 44)])
def test_slices_of_larger_tensors(bits: int, words: int, shift: int) -> None:
    """Any strides and alignment; nothing around the destination changes."""
    whole = random_words(5, 300, words + 8).cuda()
    weight_packed = whole[1:4:2, 3:259:2, shift : shift + words]
    expected = pack_qweight(weight_packed.cpu(), bits=bits)
    for margin in (4, 1):
        around = torch.full(
            (3, expected.shape[1] + 2, expected.shape[2] + 2 * margin),
            GUARD,
            dtype=torch.int32,
            device="cuda",
        )
        untouched = around.cpu()
        untouched[1:, 1:-1, margin:-margin] = expected
        slot = around[1:, 1:-1, margin:-margin]
        repack_weights(weight_packed, bits=bits, out=slot)
        equal_bytes(around, untouched, f"margin {margin}, shift {shift}")
        equal_bytes(unpack_weights(slot, bits=bits), weight_packed, f"margin {margin}, shift {shift}: back")


def test_interleaved_rows_of_experts_and_other_streams() -> None:
    weight_packed = random_words(64, 3, 8).cuda().transpose(0, 1)
    out = torch.empty(4, 3, 128, dtype=torch.int32, device="cuda").transpose(0, 1)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        repack_weights(weight_packed, bits=4, out=out)
    stream.synchronize()
    equal_bytes(out, pack_qweight(weight_packed.cpu(), bits=4), "interleaved")


def test_no_experts() -> None:
    out = torch.empty(0, 2, 128, dtype=torch.int32, device="cuda")
    assert repack_weights(torch.empty(0, 64, 4, dtype=torch.int32, device="cuda"), bits=4, out=out) is out
    assert unpack_weights(out, bits=4).shape == (0, 64, 4)


def test_more_than_two_to_the_31_words() -> None:
    """Offsets are 64 bits: the last of experts that lie 2 GiB apart."""
    if torch.cuda.mem_get_info()[0] < 24 << 30:
        pytest.skip("needs 24 GiB of GPU memory")
    weight_packed = torch.zeros(5, 64, (1 << 29) // 64 + 8, dtype=torch.int32, device="cuda")[:, :, :64]
    assert weight_packed.stride(0) * 4 > 2**31
    weight_packed.copy_(random_words(5, 64, 64))
    equal_bytes(repack_weights(weight_packed, bits=4), pack_qweight(weight_packed.cpu(), bits=4), "far apart")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("groups", [1, 2, 6, 64, 130, 224])
def test_scales(groups: int, dtype: torch.dtype) -> None:
    scales = random_words(3, 192, groups + 3).float().to(dtype)[..., 1 : groups + 1]
    equal_bytes(permute.permute_scales(scales.cuda()), permute_scales(scales), "scales")
    turned = scales.transpose(1, 2).contiguous().cuda().transpose(1, 2)
    equal_bytes(permute.permute_scales(turned), permute_scales(scales), "scales of other strides")


@pytest.mark.parametrize("groups", [1, 5, 70])
@pytest.mark.parametrize("bits", [4, 8])
def test_zero_points(bits: int, groups: int) -> None:
    zeros = random_words(3, 192 * bits // 32, groups)
    equal_bytes(
        permute.pack_zero_points(zeros.cuda(), bits=bits), pack_zero_points(zeros, bits=bits), "zero points"
    )


def compare(folder: Path, rank: dict[str, Shard], expected: dict[str, MarlinMoELayer] | None = None) -> bool:
    """Whether the layers load for the rank at all: then those on the GPU are those on the CPU."""
    try:
        on_cpu = expected or load_layers(folder, **rank)  # type: ignore[arg-type]
    except ShardError:
        with pytest.raises(ShardError):
            load_layers(folder, "cuda", **rank)  # type: ignore[arg-type]
        return False
    on_gpu = load_layers(folder, "cuda", **rank)  # type: ignore[arg-type]
    assert on_gpu.keys() == on_cpu.keys()
    for name, layer in on_gpu.items():
        assert layer.device.type == "cuda"
        same_layer(layer, on_cpu[name])
    return True


@pytest.mark.filterwarnings("ignore:.*do not all fall on 64")
@pytest.mark.parametrize("folder", checkpoint_folders(), ids=lambda path: path.name)
def test_layers_of_real_checkpoints(folder: Path, tmp_path: Path, small_blocks: None) -> None:
    source = tmp_path / "source"
    shutil.copytree(folder, source, ignore=shutil.ignore_patterns("expected*", "golden*"))
    repack_checkpoint(source, tmp_path / "packed")
    loaded = [compare(path, rank) for path in (source, tmp_path / "packed") for rank in RANKS]
    assert sum(loaded) >= 2 * 3


@pytest.mark.filterwarnings("ignore:.*do not all fall on 64")
@pytest.mark.parametrize("name", SPECS)
def test_layers_of_every_format(name: str, tmp_path: Path, small_blocks: None) -> None:
    write_checkpoint(tmp_path / "source", SPECS[name])
    repack_checkpoint(tmp_path / "source", tmp_path / "packed")
    for rank in RANKS:
        loaded = [compare(tmp_path / part, rank) for part in ("source", "packed")]
        assert loaded[0] == loaded[1]


def test_a_dtype_that_is_converted(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "source", SPECS["int4 g32 asymmetric"])
    repack_checkpoint(tmp_path / "source", tmp_path / "packed")
    for part in ("source", "packed"):
        with pytest.warns(UserWarning, match="converted once"):
            on_cpu = load_layers(tmp_path / part, dtype=torch.float32)
        with pytest.warns(UserWarning, match="converted once"):
            on_gpu = load_layers(tmp_path / part, "cuda", dtype=torch.float32)
        for name, layer in on_gpu.items():
            same_layer(layer, on_cpu[name])


@pytest.mark.parametrize("name", SPECS)
def test_repack_writes_the_same_files(name: str, tmp_path: Path, small_blocks: None) -> None:
    write_checkpoint(tmp_path / "source", SPECS[name])
    reports = [
        repack_checkpoint(tmp_path / "source", tmp_path / device, device=device, block_bytes=BLOCK_BYTES)
        for device in ("cpu", "cuda")
    ]
    assert reports[1].native_path == str(native_path("cuda"))
    names = sorted(path.name for path in (tmp_path / "cpu").iterdir())
    assert names == sorted(path.name for path in (tmp_path / "cuda").iterdir())
    for file in names:
        assert (tmp_path / "cpu" / file).read_bytes() == (tmp_path / "cuda" / file).read_bytes(), file


def test_tensors_in_memory_and_in_place() -> None:
    """process_weights and update_weights_ with tensors of either device."""
    spec = SPECS["int4 g32 asymmetric"]
    source, other = make_source(spec), make_source(replace(spec, seed=5))
    (module,) = source.layers
    scheme = QuantScheme.from_config(source.config["quantization_config"], module)
    expected = process_weights(source.expert_tensors(module), scheme=scheme)
    on_gpu = {name: tensor.cuda() for name, tensor in source.expert_tensors(module).items()}
    for tensors in (on_gpu, source.expert_tensors(module)):
        layer = process_weights(tensors, scheme=scheme, device="cuda")
        same_layer(layer, expected)
        addresses = [tensor.data_ptr() for _, tensor in layer.tensors()]
        update_weights_(layer, other.expert_tensors(module))
        same_layer(layer, process_weights(other.expert_tensors(module), scheme=scheme))
        assert [tensor.data_ptr() for _, tensor in layer.tensors()] == addresses


def test_pinned_memory_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a budget for reading, whatever the layer's size."""
    write_checkpoint(tmp_path, CheckpointSpec(num_experts=64, intermediate_size=256))
    pinned: list[int] = []
    empty = torch.empty

    def noted(*args: object, **options: object) -> torch.Tensor:
        out = empty(*args, **options)  # type: ignore[call-overload]
        if options.get("pin_memory"):
            pinned.append(out.nbytes)
        return out

    monkeypatch.setattr(torch, "empty", noted)
    run = blocks.run_blocks
    monkeypatch.setattr(process, "run_blocks", lambda *args: run(*args, block_bytes=1 << 20))
    load_layers(tmp_path, "cuda")
    assert pinned
    assert sum(pinned) <= (1 << 20) // 2 + len(pinned) * blocks.SPARE_BYTES


def test_problems_are_those_of_a_cpu(tmp_path: Path, small_blocks: None) -> None:
    write_checkpoint(tmp_path, CheckpointSpec(num_experts=9, intermediate_size=256))
    for expert in (1, 4, 8):
        name = f"model.layers.0.mlp.experts.{expert}.up_proj.weight_scale"
        replace_tensor(tmp_path, name, torch.zeros_like)
    texts = []
    for device in ("cpu", "cuda"):
        with pytest.raises(ExpertsError, match="3 problems") as caught:
            load_layers(tmp_path, device)
        texts.append(str(caught.value))
    assert texts[0] == texts[1]


def test_a_read_that_fails_is_the_loads_error(
    tmp_path: Path, small_blocks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_checkpoint(tmp_path, CheckpointSpec(num_experts=9, intermediate_size=256))
    read = TensorFile.read_bytes

    def fail(self: TensorFile, offset: int, buffer: memoryview, *, what: str) -> None:
        if ".5.down_proj" in what:
            raise CheckpointError(f"{what}: reading failed")
        read(self, offset, buffer, what=what)

    with monkeypatch.context() as patched:
        patched.setattr(TensorFile, "read_bytes", fail)
        with pytest.raises(CheckpointError, match=r"experts\.5\.down_proj.*reading failed"):
            load_layers(tmp_path, "cuda")
    assert compare(tmp_path, {})


def test_a_golden_checkpoint_in_many_repetitions(small_blocks: None) -> None:
    """Streams and reused buffers: a race would show sooner or later."""
    folder = golden("qwen3moe-w4a16-asym-g128")
    expected = load_layers(folder)
    for _ in range(30):
        assert compare(folder, {}, expected)
