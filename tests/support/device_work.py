"""What a call gives the GPU to do, as torch's profiler saw it: `device_work`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceWork:
    """A kernel, copy or memset, and how long the GPU was at it."""

    name: str
    us: float


def device_work(call: Callable[[], Any]) -> list[DeviceWork]:
    """Kernels, copies and memsets of a call, in the order in which they ran."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True) as seen:
        call()
        torch.cuda.synchronize()
    events = [event for event in seen.events() if event.device_type == DeviceType.CUDA]
    return [
        DeviceWork(name=event.name, us=event.device_time)
        for event in sorted(events, key=lambda event: event.time_range.start)
    ]
