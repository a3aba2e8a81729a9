"""What this machine can run, and why not the rest: `MachineReport`."""

import os
import platform
import re
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import Any

import torch

from ..kernels.backends.choose import Verdict, verdicts
from ..kernels.errors import MarlinMoEError
from ..kernels.plan import reference, triton_moe
from ..kernels.plan.problem import LayerFacts, MatrixFacts, MoEProblem
from ..repack.native.path import SWITCH, load_extension, native_path
from ..repack.rank_facts import cuda_bytes
from .kernel_setup import KernelSetup, examine_kernel_setup

DISTRIBUTION = "marlin-moe"
SAMPLE_NAME = "Qwen3-30B-A3B W4A16 g128, bf16, 8192 tokens, top-8"
SAMPLE_TOKENS, SAMPLE_TOP_K = 8192, 8


@dataclass(frozen=True, slots=True, kw_only=True)
class PackageReport:
    """A package that this one needs, always or for an `extra`; `version` is None where it is missing."""

    name: str
    extra: str | None
    version: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceReport:
    """A device, how weights are repacked there, and what each backend says to the sample layer on it.

    `reason` of a backend is why it rejects; `repacking` is None where MARLIN_MOE_NATIVE demands the missing.
    """

    name: str
    description: str
    memory_bytes: int | None
    repacking: str | None
    backends: tuple[Verdict, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeReport:
    """The loop that repacks weights on this CPU.

    Attributes:
        path: what runs, in words; None where nothing can.
        variant: the C loop's instruction set, or None where torch operations do it.
        variants: all that this processor has, best first.
        reason: why it is not the C loop.
        switch: the environment variable that forces it, as it is set, or None.
    """

    path: str | None
    variant: str | None
    variants: tuple[str, ...]
    reason: str | None
    switch: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineReport:
    """What this machine can run.

    Attributes:
        version: of this package.
        python, platform, torch, torch_cuda: versions; torch_cuda is None for a build without CUDA.
        threads: of torch, which repacking and the reference backend use.
        packages: dependencies and extras, with their versions.
        native: the loop that repacks weights.
        kernels: where CUDA kernels are kept, and whether they may be compiled.
        devices: the CPU and every GPU.
        no_cuda_because: why there is no CUDA device, or None where there is one.
        sample: the problem that backends and the workspace were asked about.
        sample_workspace_bytes: backend -> scratch that layers of that size share on a device.
        problems: what keeps this installation from working.
    """

    version: str
    python: str
    platform: str
    torch: str
    torch_cuda: str | None
    threads: int
    packages: tuple[PackageReport, ...]
    native: NativeReport
    kernels: KernelSetup
    devices: tuple[DeviceReport, ...]
    no_cuda_because: str | None
    sample: str
    sample_workspace_bytes: dict[str, int]
    problems: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing keeps the installation from working."""
        return not self.problems

    def as_dict(self) -> dict[str, Any]:
        """The report for JSON."""
        return {**asdict(self), "ok": self.ok}


def examine_machine() -> MachineReport:
    """Looks at packages, the C loop, the cubin cache, devices and backends; compiles nothing."""
    no_cuda = _why_no_cuda()
    packages = tuple(_packages())
    native, problems = _native()
    kernels, wrong = examine_kernel_setup()
    problems += wrong
    problems += [
        f"{package.name}: expected to be installed, because {DISTRIBUTION} needs it, got nothing. "
        f"Install {DISTRIBUTION} again."
        for package in packages
        if package.extra is None and package.version is None
    ]
    return MachineReport(
        version=metadata.version(DISTRIBUTION),
        python=platform.python_version(),
        platform=f"{platform.system()} {platform.machine()}, {sys.implementation.name}",
        torch=str(torch.__version__),
        torch_cuda=torch.version.cuda,
        threads=torch.get_num_threads(),
        packages=packages,
        native=native,
        kernels=kernels,
        devices=tuple(_devices(cuda=no_cuda is None)),
        no_cuda_because=no_cuda,
        sample=SAMPLE_NAME,
        sample_workspace_bytes=_sample_workspaces(),
        problems=tuple(problems),
    )


def _packages() -> Iterator[PackageReport]:
    """Every requirement that this package declares, but those for its own development."""
    for requirement in metadata.requires(DISTRIBUTION) or []:
        name = re.match(r"[A-Za-z0-9._-]+", requirement)
        extra = re.search(r"extra\s*==\s*[\"']([^\"']+)[\"']", requirement)
        if name is None or (extra is not None and extra[1] in ("dev", "test")):
            continue
        try:
            version = metadata.version(name[0])
        except metadata.PackageNotFoundError:
            version = None
        yield PackageReport(name=name[0], extra=None if extra is None else extra[1], version=version)


def _native() -> tuple[NativeReport, list[str]]:
    extension = load_extension()
    variants = () if isinstance(extension, str) else tuple(extension.variants())
    switch = os.environ.get(SWITCH)
    try:
        path = native_path("cpu")
    except MarlinMoEError as error:
        report = NativeReport(path=None, variant=None, variants=variants, reason=str(error), switch=switch)
        return report, [str(error)]
    return (
        NativeReport(
            path=str(path), variant=path.variant, variants=variants, reason=path.reason, switch=switch
        ),
        [],
    )


def _repacking(device: str) -> str | None:
    try:
        return str(native_path(device))
    except MarlinMoEError:  # of a CPU it is a problem of `native`; on a GPU using it says what is missing
        return None


def _why_no_cuda() -> str | None:
    if torch.version.cuda is None:
        return "this torch was built without CUDA"
    try:
        torch.cuda.current_device()  # initializes, and says why where it cannot
    except (RuntimeError, AssertionError) as error:
        return " ".join(str(error).split())
    return None if torch.cuda.device_count() else "the driver shows no device"


def _devices(*, cuda: bool) -> Iterator[DeviceReport]:
    yield DeviceReport(
        name="cpu",
        description=f"{platform.machine()}, {os.cpu_count()} cores",
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        repacking=_repacking("cpu"),
        backends=tuple(verdicts(_sample_problem("cpu"))),
    )
    for index in range(torch.cuda.device_count() if cuda else 0):
        properties = torch.cuda.get_device_properties(index)
        with torch.cuda.device(index):  # a backend asks the current device
            found = tuple(verdicts(_sample_problem("cuda")))
        yield DeviceReport(
            name=f"cuda:{index}",
            description=f"{properties.name}, sm_{properties.major}{properties.minor}",
            memory_bytes=properties.total_memory,
            repacking=_repacking(f"cuda:{index}"),
            backends=found,
        )


def _sample_workspaces() -> dict[str, int]:
    facts, rows = _sample_problem("cpu").layer, SAMPLE_TOKENS * SAMPLE_TOP_K
    return {
        "cuda": cuda_bytes(facts, rows=rows),
        "triton": triton_moe.plan_workspace(facts, rows=rows).nbytes,
        "reference": reference.plan_workspace(facts, rows=rows).nbytes,
    }


def _sample_problem(device_type: str) -> MoEProblem:
    """A layer of Qwen3-30B-A3B: 128 experts, H = 2048, I = 768, int4, groups of 128."""
    hidden, intermediate = 2048, 768
    w13, w2 = (
        MatrixFacts(
            size_k=k, size_n=n, bits=4, num_groups=k // 128, zero_points=False, sort_order=False, bias=False
        )
        for k, n in ((hidden, 2 * intermediate), (intermediate, hidden))
    )
    layer = LayerFacts(
        num_experts=128,
        num_global_experts=128,
        gated=True,
        w13=w13,
        w2=w2,
        scales_dtype=torch.bfloat16,
    )
    return MoEProblem(
        layer=layer,
        tokens=SAMPLE_TOKENS,
        top_k=SAMPLE_TOP_K,
        x_dtype=torch.bfloat16,
        device_type=device_type,
    )
