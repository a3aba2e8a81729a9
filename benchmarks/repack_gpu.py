"""Repacking on a GPU: the kernels beside `copy_` of the same bytes, and whole layers from files.

    python benchmarks/repack_gpu.py kernels [--repeats 21] [--tiles 1 --tiles 2 --tiles 4] [--json]
    python benchmarks/repack_gpu.py load [--experts 128] [--layers 4] [--directory DIR] [--json]

`kernels` counts bytes read and bytes written. Every round runs every path, one after the other, with the
GPU's L2 cache overwritten before each; figures are medians over the rounds. The first round is not counted,
and compares the bytes of all paths. `load` writes a checkpoint of layers like Qwen3-30B-A3B's, which stays
in the page cache, and loads it from the source and packed, to the CPU and to the GPU.
"""

import json
import shutil
import statistics
import subprocess
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import click
import torch
from safetensors.torch import save_file

from marlin_moe import load_layers, repack_checkpoint
from marlin_moe.kernels.layout import pack_qweight, pack_zero_points, permute_scales, unpack_qweight
from marlin_moe.repack.native import cuda_repack, permute
from marlin_moe.repack.native.path import native_path

RESULTS = Path(__file__).parent / "results"
ROOT = Path(__file__).parent.parent
SCRATCH_BYTES = 256 << 20  # written before every run: more than any L2 cache
GROUP_SIZE = {"qwen3-30b-a3b": 128, "kimi-k2.5": 32}


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One matrix [E, N, K] of a layer's experts."""

    name: str
    num_experts: int
    n: int
    k: int
    bits: int

    @property
    def group_size(self) -> int:
        """Of the model's scales."""
        return GROUP_SIZE[self.name.partition(".w")[0]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """The median of one path; `of_copy` is its part of the speed of `copy_` of the same bytes."""

    problem: str
    what: str
    path: str
    bytes_moved: int
    microseconds: float
    gigabytes_per_s: float
    of_copy: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadMeasurement:
    """The median time of loading or repacking a checkpoint."""

    what: str
    layer_bytes: int
    seconds: float
    gigabytes_per_s: float


# A layer of Qwen3-30B-A3B and 48 experts of Kimi-K2.5.
PROBLEMS = [
    Problem(name=name, num_experts=num_experts, n=n, k=k, bits=bits)
    for bits in (4, 8)
    for name, num_experts, n, k in (
        ("qwen3-30b-a3b.w13", 128, 2 * 768, 2048),
        ("qwen3-30b-a3b.w2", 128, 2048, 768),
        ("kimi-k2.5.w13", 48, 2 * 2048, 7168),
        ("kimi-k2.5.w2", 48, 7168, 2048),
    )
]
Paths = list[tuple[str, Callable[[], torch.Tensor]]]


def weight_paths(problem: Problem, tiles: tuple[int, ...]) -> Iterator[tuple[str, torch.Tensor, Paths]]:
    """(what, source, paths) of packing and of unpacking; the first path is torch's, without `copy_`."""
    shape = (problem.num_experts, problem.n, problem.k * problem.bits // 32)
    packed = torch.randint(-(2**31), 2**31, shape, dtype=torch.int32, device="cuda")
    qweight = pack_qweight(packed, bits=problem.bits)
    for what, source, by_torch, by_kernel in (
        ("pack", packed, pack_qweight, cuda_repack.pack_on_device),
        ("unpack", qweight, unpack_qweight, cuda_repack.unpack_on_device),
    ):
        out = torch.empty_like(qweight if what == "pack" else packed)
        paths: Paths = [("torch", partial(by_torch, source, bits=problem.bits))]
        for count in tiles:
            run = partial(by_kernel, source, out, bits=problem.bits, tiles=count)
            paths.append((f"kernel, {count} tiles", run))
        yield f"{what} int{problem.bits}", source, paths


def order_paths(problem: Problem) -> Iterator[tuple[str, torch.Tensor, Paths]]:
    """(what, source, paths) of scales and zero points."""
    groups = problem.k // problem.group_size
    shape = (problem.num_experts, problem.n, groups)
    scales = torch.rand(shape, device="cuda").to(torch.bfloat16)
    yield (
        "scales bf16",
        scales,
        [("torch", partial(permute_scales, scales)), ("kernel", partial(permute.permute_scales, scales))],
    )
    words = (problem.num_experts, problem.n * problem.bits // 32, groups)
    zeros = torch.randint(-(2**31), 2**31, words, dtype=torch.int32, device="cuda")
    yield (
        f"zero points int{problem.bits}",
        zeros,
        [
            ("torch", partial(pack_zero_points, zeros, bits=problem.bits)),
            ("kernel", partial(permute.pack_zero_points, zeros, bits=problem.bits)),
        ],
    )


def measure(
    problem: Problem, what: str, source: torch.Tensor, paths: Paths, repeats: int
) -> list[Measurement]:
    """`copy_` and every path, in turn."""
    copied, scratch = torch.empty_like(source), torch.empty(SCRATCH_BYTES, dtype=torch.uint8, device="cuda")
    expected = paths[0][1]()
    every: Paths = [("copy_", lambda: copied.copy_(source)), *paths]
    times: dict[str, list[float]] = {name: [] for name, _ in every}
    for repeat in range(repeats + 1):
        for name, run in every:
            scratch.fill_(repeat % 251)
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(200_000)  # the launch is made meanwhile, so that host time is not counted
            start.record()
            out = run()
            end.record()
            end.synchronize()
            if repeat:
                times[name].append(start.elapsed_time(end) * 1e3)
            elif name != "copy_" and not torch.equal(out, expected):
                raise click.ClickException(f"{problem.name}, {what}: {name} gives other bytes than torch.")
    medians = {name: statistics.median(found) for name, found in times.items()}
    moved = 2 * source.nbytes
    return [
        Measurement(
            problem=problem.name,
            what=what,
            path=name,
            bytes_moved=moved,
            microseconds=round(median, 2),
            gigabytes_per_s=round(moved / median / 1e3, 1),
            of_copy=round(medians["copy_"] / median, 3),
        )
        for name, median in medians.items()
    ]


def write_checkpoint(path: Path, *, layers: int, experts: int) -> None:
    """Layers of `experts` experts, 768 x 2048 in INT4 with groups of 128, in one file each."""
    hidden, intermediate, group = 2048, 768, 128
    generator = torch.Generator().manual_seed(0)
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": group}
    config = {
        "model_type": "qwen3_moe",
        "num_experts": experts,
        "num_experts_per_tok": min(8, experts),
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
            "ignore": [],
        },
    }
    (path / "config.json").write_text(json.dumps(config))
    index: dict[str, str] = {}
    for layer in range(layers):
        file = f"model-{layer + 1:05d}-of-{layers:05d}.safetensors"
        tensors = {}
        for expert in range(experts):
            for projection, n, k in (
                ("gate_proj", intermediate, hidden),
                ("up_proj", intermediate, hidden),
                ("down_proj", hidden, intermediate),
            ):
                stem = f"model.layers.{layer}.mlp.experts.{expert}.{projection}"
                tensors[f"{stem}.weight_packed"] = torch.randint(
                    -(2**31), 2**31, (n, k // 8), dtype=torch.int32, generator=generator
                )
                tensors[f"{stem}.weight_scale"] = (
                    torch.rand(n, k // group, generator=generator) + 0.1
                ).bfloat16()
        save_file(tensors, path / file)
        index |= dict.fromkeys(tensors, file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))


def measure_loads(directory: Path, *, layers: int, experts: int, repeats: int) -> list[LoadMeasurement]:
    """Loading from the source and packed, repacking, and the copy of as many pinned bytes to the GPU."""
    source = directory / "source"
    source.mkdir()
    write_checkpoint(source, layers=layers, experts=experts)
    repack_checkpoint(source, directory / "packed")
    found = load_layers(source, "cuda")
    layer_bytes = sum(tensor.nbytes for layer in found.values() for _, tensor in layer.tensors())
    del found
    pinned = torch.empty(min(layer_bytes, 1 << 30), dtype=torch.uint8, pin_memory=True)
    target = torch.empty_like(pinned, device="cuda")

    def copy() -> None:
        for _ in range(-(-layer_bytes // pinned.numel())):
            target.copy_(pinned, non_blocking=True)

    count = 0

    def repack(device: str) -> None:
        nonlocal count
        count += 1
        repack_checkpoint(source, directory / f"again-{count}", device=device)
        shutil.rmtree(directory / f"again-{count}")

    actions: dict[str, Callable[[], object]] = {
        "copy_ from pinned memory to cuda": copy,
        **{
            f"load_layers({part}, {device})": partial(load_layers, directory / part, device)
            for part in ("source", "packed")
            for device in ("cpu", "cuda")
        },
        **{f"repack_checkpoint(source, {device})": partial(repack, device) for device in ("cpu", "cuda")},
    }
    times: dict[str, list[float]] = {what: [] for what in actions}
    for repeat in range(repeats + 1):
        for what, action in actions.items():
            start = time.perf_counter()
            result = action()
            torch.cuda.synchronize()
            if repeat:
                times[what].append(time.perf_counter() - start)
            del result
    return [
        LoadMeasurement(
            what=what,
            layer_bytes=layer_bytes,
            seconds=round(median, 4),
            gigabytes_per_s=round(layer_bytes / median / 1e9, 2),
        )
        for what, median in ((what, statistics.median(found)) for what, found in times.items())
    ]


def machine() -> dict[str, str | int]:
    """What the figures depend on besides the problem."""
    git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=40"]
    found = subprocess.run(git, capture_output=True, text=True, check=False) if shutil.which("git") else None
    return {
        "gpu": torch.cuda.get_device_name(),
        "path": str(native_path("cuda")),
        "threads": torch.get_num_threads(),
        "torch": str(torch.__version__),
        "cuda": str(torch.version.cuda),
        "commit": (found.stdout.strip() if found else "") or "none",
    }


def write_results(name: str, measurements: list[Measurement] | list[LoadMeasurement]) -> None:
    """`results/<name>.json`."""
    RESULTS.mkdir(exist_ok=True)
    report = {"machine": machine(), "measurements": [asdict(entry) for entry in measurements]}
    (RESULTS / f"{name}.json").write_text(json.dumps(report, indent=1) + "\n")


@click.group(help=__doc__.partition("\n")[0])
def main() -> None:
    """Measure, print, and write the results."""
    warnings.simplefilter("ignore")


json_option = click.option("--json", "as_json", is_flag=True, help="Also write benchmarks/results.")


@main.command(help="The kernels beside copy_ on the device.")
@click.option("--repeats", type=click.IntRange(min=1), default=21, show_default=True)
@click.option("--tiles", multiple=True, type=click.IntRange(1, 4), default=(cuda_repack.TILES,))
@click.option("--problem", "part", default="", help="Only problems with this in their name, such as `kimi`.")
@json_option
def kernels(repeats: int, tiles: tuple[int, ...], part: str, as_json: bool) -> None:
    """Every matrix, every path."""
    measurements: list[Measurement] = []
    for problem in (problem for problem in PROBLEMS if part in problem.name):
        click.echo(f"{problem.name} int{problem.bits}  {problem.num_experts} x {problem.n} x {problem.k}")
        cases = [*weight_paths(problem, tiles), *order_paths(problem)]
        for what, source, paths in cases:
            for entry in measure(problem, what, source, paths, repeats):
                click.echo(
                    f"  {what:<18} {entry.path:<16} {entry.microseconds:9.1f} us "
                    f"{entry.gigabytes_per_s:8.1f} GB/s = {entry.of_copy:.2f} of copy_"
                )
                measurements.append(entry)
        del cases
    if as_json:
        write_results("repack_gpu_kernels", measurements)


@main.command(help="Whole layers from files in the page cache.")
@click.option("--layers", type=click.IntRange(min=1), default=4, show_default=True)
@click.option("--experts", type=click.IntRange(min=1), default=128, show_default=True)
@click.option("--repeats", type=click.IntRange(min=1), default=5, show_default=True)
@click.option(
    "--directory", type=click.Path(path_type=Path), help="Where to write, else the temporary folder."
)
@json_option
def load(layers: int, experts: int, repeats: int, directory: Path | None, as_json: bool) -> None:
    """Every way to a layer."""
    with tempfile.TemporaryDirectory(dir=directory, prefix="repack-gpu-") as work:
        measurements = measure_loads(Path(work), layers=layers, experts=experts, repeats=repeats)
    for entry in measurements:
        click.echo(f"{entry.what:<36} {entry.seconds:8.3f} s {entry.gigabytes_per_s:7.2f} GB/s")
    if as_json:
        write_results("repack_gpu_load", measurements)


if __name__ == "__main__":
    main()
