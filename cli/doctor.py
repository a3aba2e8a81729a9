"""`marlin-moe doctor`."""

import os
from typing import TYPE_CHECKING

import click

from .options import json_option
from .output import bytes_text, counted, print_json

if TYPE_CHECKING:
    from .kernel_setup import KernelSetup
    from .machine import MachineReport


@click.command()
@json_option
def doctor(as_json: bool) -> None:
    """Say what this machine can run, and why not the rest.

    Lists the packages, the loop that repacks weights (C or torch), the cache of CUDA kernels and whether they
    may be compiled, every device with the backends of the op that accept it or the reason why they do not,
    and the workspace that a known layer needs. Exit code 1 if something keeps this installation from working.

    \b
    Example:
      marlin-moe doctor
    """
    from ..kernels.errors import MarlinMoEError
    from .machine import examine_machine

    report = examine_machine()
    if as_json:
        print_json(report.as_dict())
    else:
        _print(report)
    if not report.ok:
        raise MarlinMoEError("\n".join(["this installation does not work as set up:", *report.problems]))


def _print(report: "MachineReport") -> None:
    cuda = f"CUDA {report.torch_cuda}" if report.torch_cuda else "without CUDA"
    _say("marlin-moe", f"{report.version}, Python {report.python}, {report.platform}")
    _say("torch", f"{report.torch} ({cuda}), {report.threads} threads")
    needed = [package for package in report.packages if package.extra is None and package.name != "torch"]
    _say("packages", ", ".join(f"{package.name} {package.version or 'MISSING'}" for package in needed))
    for extra in sorted({package.extra for package in report.packages if package.extra}):
        members = [package for package in report.packages if package.extra == extra]
        missing = [package.name for package in members if package.version is None]
        found = ", ".join(f"{package.name} {package.version}" for package in members if package.version)
        advice = f"missing {', '.join(missing)}: pip install 'marlin-moe[{extra}]'" if missing else ""
        _say(f"extra {extra}", "; ".join(part for part in (found, advice) if part))
    native = report.native
    others = [variant for variant in native.variants if variant != native.variant]
    also = f"; this processor also has {', '.join(others)}" if native.variant and others else ""
    _say("repacking", f"{native.path or 'none'}{also}")
    _print_kernels(report.kernels)
    for device in report.devices:
        memory = "" if device.memory_bytes is None else f", {bytes_text(device.memory_bytes)}"
        _say(device.name, device.description + memory)
        if device.name != "cpu":
            click.echo(f"{'':14}repacking {device.repacking or 'none'}")
        for verdict in device.backends:
            click.echo(f"{'':14}backend {verdict}")
    if report.no_cuda_because is not None:
        _say("cuda", f"no device: {report.no_cuda_because}")
    sizes = ", ".join(f"{name} {bytes_text(n)}" for name, n in report.sample_workspace_bytes.items())
    _say("workspace", f"{sizes}, for {report.sample}")


def _print_kernels(setup: "KernelSetup") -> None:
    cache = setup.cache
    held = f"{counted(cache.entries, 'kernel')}, {bytes_text(cache.nbytes)}"
    state = f"none can be stored: {cache.reason}" if cache.reason else "usable"
    _say("kernel cache", f"refused: {cache.problem}" if cache.problem else f"{cache.path}: {held}; {state}")
    variable = "MARLIN_MOE_JIT"
    answer = {None: "not known", False: "forbidden", True: "allowed"}[setup.compiling]
    set_to = f"={os.environ[variable]}" if variable in os.environ else " is not set"
    _say("compiling", f"{answer} ({variable}{set_to})")


def _say(what: str, text: str) -> None:
    click.echo(f"{what:<13} {text}")
