"""`marlin-moe demo`."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from .options import json_option
from .output import counted, print_json
from .report import ended_in_order

if TYPE_CHECKING:
    from .demo_proof import ProofStep


@click.command()
@click.option(
    "--keep",
    metavar="DIR",
    type=click.Path(path_type=Path),
    help="Leave the checkpoints (source, packed, unpacked) in DIR, a new or empty directory.",
)
@json_option
def demo(keep: Path | None, as_json: bool) -> None:
    """Make a small checkpoint, repack, verify, load and run it, and print the proof.

    The checkpoint is quantized by compressed-tensors' own code, and what the op gives is compared with
    float64 arithmetic on the weights that compressed-tensors decompresses. Works offline on any CPU, in less
    than a minute. Exit code 1 if a step fails.

    \b
    Example:
      marlin-moe demo --keep /tmp/marlin-moe-demo
    """
    from ..repack.errors import VerifyError
    from .demo_proof import prove

    with ended_in_order(), _directory(keep) as directory:
        report = prove(directory, kept=keep is not None, say=(lambda step: None) if as_json else _print)
    if as_json:
        print_json(report.as_dict())
    elif report.ok:
        where = f" The checkpoints are in {keep}." if keep else ""
        click.echo(f"all {len(report.steps)} steps hold, in {report.seconds:.1f} s.{where}")
    failed = [step for step in report.steps if not step.passed]
    if failed:
        lines = [f"demo: {counted(len(failed), 'step')} of {len(report.steps)} failed:"]
        raise VerifyError("\n".join(lines + [f"{step.claim}: {step.evidence}" for step in failed]))


def _print(step: "ProofStep") -> None:
    click.echo(f"{'ok  ' if step.passed else 'FAIL'} {step.claim}\n     {step.evidence}")


@contextmanager
def _directory(keep: Path | None) -> Iterator[Path]:
    """`keep`, new or empty, or a directory that is removed at the end."""
    from ..repack.errors import CheckpointError

    if keep is None:
        with tempfile.TemporaryDirectory(prefix="marlin-moe-demo-") as path:
            yield Path(path)
        return
    if keep.exists() and (not keep.is_dir() or any(keep.iterdir())):
        found = "one with files in it" if keep.is_dir() else "a file"
        raise CheckpointError(f"{keep}: expected a new or empty directory for --keep, got {found}.")
    keep.mkdir(parents=True, exist_ok=True)
    yield keep
