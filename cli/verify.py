"""`marlin-moe verify PACKED [SRC]`."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from .options import json_option
from .output import bytes_text, counted, print_json
from .progress import shown_progress

if TYPE_CHECKING:
    from ..repack.verify import VerifyReport


@click.command()
@click.argument("packed", type=click.Path(path_type=Path))
@click.argument("src", type=click.Path(path_type=Path), required=False)
@click.option("--follow-links", is_flag=True, help="Follow links that lead out of SRC.")
@click.option(
    "--workers", type=click.IntRange(min=1), help="Files and layers compared at once; by default one a core."
)
@json_option
def verify(packed: Path, src: Path | None, follow_links: bool, workers: int | None, as_json: bool) -> None:
    """Prove that the packed checkpoint in PACKED is whole and, with SRC, that it equals its source.

    Without SRC every file and tensor is hashed and compared with the manifest. With SRC the packed experts
    are also turned back, without the code that packed them, and compared with the source byte for byte, and
    so is everything that was carried over. Exit code 1 if anything differs.

    \b
    Example:
      marlin-moe verify Qwen3-30B-A3B-marlin Qwen3-30B-A3B-W4A16
    """
    from ..repack.errors import VerifyError
    from ..repack.verify import verify_checkpoint

    with shown_progress("verify") as progress:
        report = verify_checkpoint(packed, src, follow_links=follow_links, workers=workers, progress=progress)
    if as_json:
        print_json(report.as_dict())
    elif report.ok:
        _print(report)
    if report.unlisted_files and not as_json:
        names = ", ".join(report.unlisted_files)
        click.echo(f"{packed}: not in the manifest, so no part of the checkpoint: {names}", err=True)
    if not report.ok:
        headline = f"{packed}: {counted(report.problem_count, 'problem')}:"
        raise VerifyError("\n".join([headline, *(problem.message for problem in report.problems)]))


def _print(report: "VerifyReport") -> None:
    click.echo(
        f"{report.packed}: {counted(report.layers, 'layer')}, {counted(report.files, 'file')}, "
        f"{counted(report.tensors, 'tensor')}, {bytes_text(report.packed_bytes)}: every hash is right"
    )
    if report.source is not None:
        click.echo(
            f"{report.source}: {counted(report.source_tensors, 'tensor')}, "
            f"{bytes_text(report.source_bytes)}: every byte is equal"
        )
    click.echo(f"verified in {report.seconds:.1f} s")
