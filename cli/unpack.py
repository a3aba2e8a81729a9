"""`marlin-moe unpack PACKED DST`."""

from pathlib import Path

import click

from .options import json_option
from .output import bytes_text, counted, print_json
from .progress import shown_progress


@click.command()
@click.argument("packed", type=click.Path(path_type=Path))
@click.argument("dst", type=click.Path(path_type=Path))
@json_option
def unpack(packed: Path, dst: Path, as_json: bool) -> None:
    """Turn the packed checkpoint in PACKED back into the one it was made from, in DST.

    The source comes back with the same files, tensor names, dtypes, bytes and config, whatever tool wrote
    it: compressed-tensors, GPTQ or AWQ. DST is new or empty, or holds an interrupted run of the same PACKED,
    which is then completed.

    \b
    Example:
      marlin-moe unpack Qwen3-30B-A3B-marlin Qwen3-30B-A3B-again
    """
    from ..repack.unpack import unpack_checkpoint

    with shown_progress("unpack") as progress:
        report = unpack_checkpoint(packed, dst, progress=progress)
    if as_json:
        print_json(report.as_dict())
        return
    if report.already_complete:
        click.echo(
            f"{dst}: already complete: {counted(report.layers, 'layer')}, "
            f"{counted(report.tensors, 'tensor')}, {bytes_text(report.source_bytes)} in "
            f"{counted(report.files, 'file')}"
        )
        return
    resumed = f", {counted(report.resumed_files, 'file')} from an earlier run" if report.resumed_files else ""
    click.echo(
        f"{dst}: {counted(report.layers, 'layer')}, {counted(report.tensors, 'tensor')}, "
        f"{bytes_text(report.source_bytes)} in {counted(report.files, 'file')}{resumed}, "
        f"{report.seconds:.1f} s"
    )
