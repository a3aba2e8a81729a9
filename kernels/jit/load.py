"""BuildSpec and device to a kernel that can be launched: `load_kernel`, `LoadedKernel`."""

import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch

from ..errors import DriverError, JitError
from .build import obtain_cubin
from .compile import CompiledKernel
from .driver import DriverFunction, allow_dynamic_smem, launch_kernel_ex, load_function, max_blocks_per_sm
from .launch import Argument, Dim, PreparedLaunch, pack_arguments
from .ptxas import FunctionUsage
from .spec import BuildSpec

_loaded: dict[tuple[BuildSpec, int, str], "LoadedKernel"] = {}
_lock = threading.Lock()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LoadedKernel:
    """A kernel on a device.

    Fields:
        compiled: the cubin that it comes from.
        usage: its registers, spills and static shared memory.
        function: the driver's handle, its parameters and the device's limits.
    """

    compiled: CompiledKernel
    usage: FunctionUsage
    function: DriverFunction

    def max_blocks_per_sm(self, block: Dim, smem_bytes: int = 0) -> int:
        """How many blocks one multiprocessor holds at once."""
        allow_dynamic_smem(self.function, smem_bytes)
        return max_blocks_per_sm(self.function, _threads(block), smem_bytes)

    def max_cooperative_blocks(self, block: Dim, smem_bytes: int = 0) -> int:
        """The largest grid of which all blocks run at once, as a cooperative launch wants."""
        return self.max_blocks_per_sm(block, smem_bytes) * self.function.num_sms

    def prepare(
        self,
        *,
        grid: Dim,
        block: Dim,
        smem_bytes: int = 0,
        cooperative: bool = False,
        programmatic: bool = False,
    ) -> PreparedLaunch:
        """A launch of this shape, to be repeated.

        Args:
            grid, block, smem_bytes, cooperative: as in `launch`.
            programmatic: whether blocks may come while the stream's kernel before still runs, which then
                must say itself where it waits for that one (griddepcontrol.wait, from sm_90 on).

        Raises:
            DriverError: the device has less shared memory, or cannot hold a cooperative grid at once.
        """
        allow_dynamic_smem(self.function, smem_bytes)
        if cooperative:
            blocks = prod(grid) if isinstance(grid, tuple) else grid
            most = self.max_cooperative_blocks(block, smem_bytes)
            if blocks > most:
                raise DriverError(
                    f"{self.function.name}: expected a cooperative grid of at most {most} blocks, because "
                    f"all must run at once on the {self.function.num_sms} multiprocessors of device "
                    f"{self.function.device}, got {blocks}."
                )
        return PreparedLaunch(
            launch_kernel_ex(),
            self.function,
            grid=grid,
            block=block,
            smem_bytes=smem_bytes,
            cooperative=cooperative,
            programmatic=programmatic,
        )

    def launch(
        self,
        grid: Dim,
        block: Dim,
        smem_bytes: int,
        stream: int,
        args: Sequence[Argument],
        *,
        cooperative: bool = False,
    ) -> None:
        """Launches once; where it counts, `prepare` and repeat.

        Args:
            grid, block: sizes, or up to three of them.
            smem_bytes: dynamic shared memory of a block.
            stream: a CUstream, as `torch.cuda.current_stream().cuda_stream`; its device is the current one.
            args: as `pack_arguments` takes them.
            cooperative: whether the blocks may wait for each other.

        Raises:
            DriverError: as `prepare`, or the arguments do not fit, or the driver refuses.
        """
        parameters = pack_arguments(self.function, args)
        self.prepare(grid=grid, block=block, smem_bytes=smem_bytes, cooperative=cooperative)(
            stream, parameters
        )


def load_kernel(
    spec: BuildSpec, device: torch.device | int | str, *, kernel: str | None = None
) -> LoadedKernel:
    """The kernel on the device: from this process, else from the cache, else compiled.

    A source edited after its first use in this process is not seen.

    Args:
        spec: what to build.
        device: a CUDA device.
        kernel: which of the spec's kernels; the first when None.

    Raises:
        JitError: as `obtain_cubin`; no CUDA device; or the spec has no such kernel.
        DriverError: the driver does not load it.
    """
    ordinal = _ordinal(device)
    name = spec.kernels[0] if kernel is None else kernel
    if name not in spec.kernels:
        raise JitError(f"{spec.title}: kernel: expected one of {', '.join(spec.kernels)}, got {name!r}.")
    memo = (spec, ordinal, name)
    if (loaded := _loaded.get(memo)) is not None:
        return loaded
    compiled = obtain_cubin(spec)
    with _lock:
        if memo not in _loaded:
            title = spec.title if len(spec.kernels) == 1 else f"{spec.title}:{name}"
            function = load_function(compiled.cubin, compiled.symbol(name), name=title, device=ordinal)
            _loaded[memo] = LoadedKernel(compiled=compiled, usage=compiled.usage(name), function=function)
        return _loaded[memo]


def _ordinal(device: torch.device | int | str) -> int:
    if isinstance(device, int):
        return device
    found = torch.device(device)
    if found.type != "cuda":
        raise JitError(f"device: expected a CUDA device to load a kernel on, got {found}.")
    return torch.cuda.current_device() if found.index is None else found.index


def _threads(block: Dim) -> int:
    return block if isinstance(block, int) else prod(block)


def _renew_lock() -> None:
    """For a forked child, where a thread that held the lock does not exist."""
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_renew_lock)
