"""`marlin-moe kernels build PATH`."""

import re
from pathlib import Path
from typing import TYPE_CHECKING

import click

from .options import json_option
from .output import bytes_text, counted, print_json, print_table

if TYPE_CHECKING:
    from ..repack.build_kernels import KernelsReport

ARCH = re.compile(r"sm_(\d{2,3})([af]?)")
OLDEST, FIRST_WITH_SUFFIX = 80, 90


def architectures(context: click.Context, parameter: click.Parameter, value: str) -> tuple[str, ...]:
    """The names in `sm_80,sm_90a`, spelled as a device's kernels are looked up.

    Raises:
        click.BadParameter: a name that no device here has.
    """
    names = [name.strip() for name in value.split(",")]
    for name in names:
        match = ARCH.fullmatch(name)
        if match is None or int(match[1]) < OLDEST:
            raise click.BadParameter(f"expected names like sm_80 or sm_90a, from sm_80 on, got {name!r}")
        right = f"sm_{match[1]}" + ("a" if int(match[1]) >= FIRST_WITH_SUFFIX else "")
        if name != right:
            raise click.BadParameter(f"expected {right}, as devices of that kind look for it, got {name!r}")
    return tuple(dict.fromkeys(names))


@click.group()
def kernels() -> None:
    """Compile CUDA kernels ahead of the first call."""


@kernels.command()
@click.argument("path", type=click.Path(path_type=Path))
@click.option(
    "--arch",
    "archs",
    metavar="NAMES",
    required=True,
    callback=architectures,
    help="GPUs to compile for: sm_80 (A100), sm_86, sm_89 (L40), sm_90a (H100, H200), sm_100a, sm_120a; "
    "with commas.",
)
@click.option("--tp", metavar="N", type=click.IntRange(min=1), default=1, help="For N tensor-parallel ranks.")
@click.option("--ep", metavar="M", type=click.IntRange(min=1), default=1, help="For M expert-parallel ranks.")
@click.option(
    "--max-tokens",
    metavar="N",
    type=click.IntRange(min=1),
    default=8192,
    show_default=True,
    help="Tokens that one pass takes, as given to load_layers.",
)
@click.option(
    "--top-k", metavar="T", type=click.IntRange(min=1), help="Experts per token; the config's by default."
)
@click.option(
    "--dtype",
    type=click.Choice(["bfloat16", "float16"]),
    help="As given to load_layers; the source's by default.",
)
@json_option
def build(
    path: Path,
    archs: tuple[str, ...],
    tp: int,
    ep: int,
    max_tokens: int,
    top_k: int | None,
    dtype: str | None,
    as_json: bool,
) -> None:
    """Compile all kernels that a checkpoint's layers can need, into the cubin cache.

    PATH is a source checkpoint or a packed one; only its headers are read. No GPU is needed. A process that
    then runs these layers with the same split, version and cache compiles nothing, also under
    MARLIN_MOE_JIT=forbid. The cache is $MARLIN_MOE_CACHE, else below $XDG_CACHE_HOME or ~/.cache.

    \b
    Example:
      marlin-moe kernels build Qwen3-30B-A3B-marlin --arch sm_80,sm_90a --tp 4
    """
    import torch

    from ..repack.build_kernels import build_kernels

    report = build_kernels(
        path,
        archs,
        tp=tp,
        ep=ep,
        max_tokens=max_tokens,
        top_k=top_k,
        dtype=None if dtype is None else getattr(torch, dtype),
    )
    if as_json:
        print_json(report.as_dict())
    else:
        _print(report)
    for text in sorted({f"{kernel.name}: {text}" for kernel in report.kernels for text in kernel.warnings}):
        click.echo(f"warning: {text}", err=True)


def _print(report: "KernelsReport") -> None:
    from ..kernels.jit.cache import cache_root

    numbers = ("seconds", "registers", "spilled", "shared", "size")
    rows = [
        (
            kernel.name,
            kernel.arch,
            "yes" if kernel.cached else "no",
            f"{kernel.seconds:.1f}",
            str(kernel.registers),
            bytes_text(kernel.spill_store_bytes + kernel.spill_load_bytes),
            bytes_text(kernel.static_smem_bytes),
            bytes_text(kernel.cubin_bytes),
        )
        for kernel in report.kernels
    ]
    print_table(("kernel", "arch", "cached", *numbers), rows, numbers=numbers)
    compiled = sum(not kernel.cached for kernel in report.kernels)
    slots = f"top-{report.top_k}" if report.top_k else "any top-k"
    click.echo(
        f"{report.path}: {counted(report.layers, 'layer')}, tp={report.tp}, ep={report.ep}, "
        f"up to {report.max_tokens:,} tokens, {slots}: "
        f"{counted(len(report.kernels), 'kernel')}, {compiled} compiled now, in {cache_root()}"
    )
