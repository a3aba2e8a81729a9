"""Compiling what a call of the Triton backend launches, for a GPU that is not there: `compile_call`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from marlin_moe.kernels.backends import triton_moe
from marlin_moe.kernels.plan.triton_moe import plan_workspace
from marlin_moe.kernels.scratch import Lease, Scratch, StreamKey
from moe_cases import MoECase, make_call, make_layer

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
SMEM_BYTES = {"sm_80": 99 << 10, "sm_90": 227 << 10, "sm_100": 227 << 10, "gfx942": 64 << 10}
"""Of a block; sm_80's binaries also run on sm_86 and sm_89, which have less."""


class Driver:
    """What Triton asks its driver for before it compiles."""

    def __init__(self, target: GPUTarget) -> None:
        self.target = target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self.target


@contextlib.contextmanager
def compiling_for(target: GPUTarget) -> Iterator[list[Any]]:
    """Launches compile for the target, and nothing runs; yields the kernels."""
    kernels: list[Any] = []
    run = JITFunction.run

    def compile_only(self: JITFunction, *arguments: Any, **options: Any) -> Any:
        self.device_caches.clear()  # each target has one device, 0
        kernels.append(run(self, *arguments, **(options | {"warmup": True})))
        return kernels[-1]

    driver = triton.runtime.driver
    before = driver._active
    with mock.patch.object(JITFunction, "run", compile_only):
        driver.set_active(Driver(target))
        try:
            yield kernels
        finally:
            driver._active = before


def compile_call(case: MoECase, target: GPUTarget) -> list[Any]:
    """The compiled kernels of a call, in the order of its launches; arguments are those of a real one."""
    made = make_layer(case)
    call = make_call(case, made.layer)
    arguments = call.arguments(made.layer)
    plan = plan_workspace(arguments.workspace().facts, rows=case.tokens * case.top_k)
    key = StreamKey.current(torch.device("cpu"))
    lease = Lease.lay_over(Scratch.allocate(key, plan.nbytes), plan)
    with compiling_for(target) as kernels:
        triton_moe.run(arguments, torch.empty(call.x.shape, dtype=call.x.dtype), lease)
    return kernels
