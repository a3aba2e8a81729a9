"""The commands: where each lives, and the line that `marlin-moe --help` prints without importing it."""

import importlib
from dataclasses import dataclass

import click


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandEntry:
    """The click command `attribute` in `module` of this package, and its line in `marlin-moe --help`."""

    module: str
    attribute: str
    summary: str


def _entry(name: str, summary: str) -> CommandEntry:
    """A command that is called like its module."""
    return CommandEntry(module=f".{name}", attribute=name, summary=summary)


COMMANDS = {
    "inspect": _entry("inspect", "Show the MoE layers of a checkpoint and what Marlin can run."),
    "repack": _entry("repack", "Write a checkpoint anew with its experts in the Marlin layout."),
    "verify": _entry("verify", "Prove that a packed checkpoint is whole and equals its source."),
    "unpack": _entry("unpack", "Turn a packed checkpoint back into the one it was made from."),
    "kernels": _entry("kernels", "Compile CUDA kernels ahead: `kernels build PATH --arch sm_90a`."),
    "bench": _entry("bench", "Measure a model: `bench model`; draw layer benchmarks: `bench plot`."),
    "doctor": _entry("doctor", "Say what this machine can run, and why not the rest."),
    "demo": _entry("demo", "Make a small checkpoint, repack, verify, load and run it."),
}


def load_command(name: str) -> click.Command | None:
    """The click command of that name, imported now; None for a name that is not in the table."""
    entry = COMMANDS.get(name)
    if entry is None:
        return None
    command = getattr(importlib.import_module(entry.module, __package__), entry.attribute)
    if not isinstance(command, click.Command):
        raise TypeError(f"{entry.module}.{entry.attribute}: expected a click command, got {command!r}")
    return command
