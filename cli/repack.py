"""`marlin-moe repack SRC DST`."""

from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import click

from .options import json_option, usable_device
from .output import bytes_text, counted, print_json
from .progress import shown_progress

if TYPE_CHECKING:
    import torch

    from ..repack.store import RepackReport


@click.command()
@click.argument("src", type=click.Path(path_type=Path))
@click.argument("dst", type=click.Path(path_type=Path))
@click.option(
    "--device", callback=usable_device, default="cpu", show_default=True, help="Where the stages run."
)
@click.option(
    "--allow-dead-experts",
    is_flag=True,
    help="Accept projections whose scales are all zero: experts that calibration never reached.",
)
@click.option("--follow-links", is_flag=True, help="Follow links that lead out of the directory.")
@click.option(
    "--workers",
    type=click.IntRange(min=1),
    help="Files made at once, by threads; by default one a core, on a GPU one.",
)
@json_option
def repack(
    src: Path,
    dst: Path,
    device: "torch.device",
    allow_dead_experts: bool,
    follow_links: bool,
    workers: int | None,
    as_json: bool,
) -> None:
    """Write the checkpoint in SRC anew into DST, with its routed experts in the Marlin layout.

    SRC is a directory with config.json and safetensors files, as downloaded; it stays as it is. DST is new
    or empty, or holds an interrupted run of the same SRC, which is then completed; where all is done already
    nothing is written. DST stands alone: what is no routed expert is carried over unchanged, and every
    tensor-parallel and expert-parallel split loads from it.

    SRC may also be a model on the Hugging Face Hub: org/model, or org/model@revision. Several machines share
    a run under torchrun or Slurm (torchrun … -m marlin_moe.cli repack SRC DST): every process takes a part of
    the layers, the first one writes the manifest. Run the same command again after a fault: it completes what
    is missing.

    \b
    Example:
      marlin-moe repack Qwen3-30B-A3B-W4A16 Qwen3-30B-A3B-marlin
    """
    from ..repack.native.path import native_path
    from ..repack.ranks import ranks_from_environment
    from ..repack.store import repack_checkpoint

    with ranks_from_environment() as ranks:
        if ranks.is_first:
            click.echo(f"repacking weights by {native_path(device)}", err=True)
        with shown_progress("repack") if ranks.is_first else nullcontext() as progress:
            report = repack_checkpoint(
                src,
                dst,
                device=device,
                allow_dead_experts=allow_dead_experts,
                follow_links=follow_links,
                workers=workers,
                ranks=ranks,
                progress=progress,
            )
    if ranks.is_first:
        _print(report, dst, src, as_json=as_json)


def _print(report: "RepackReport", dst: Path, src: Path, *, as_json: bool) -> None:
    if as_json:
        print_json(report.as_dict())
        return
    if report.already_complete:
        click.echo(
            f"{dst}: already complete: {counted(report.layers, 'layer')}, "
            f"{bytes_text(report.packed_bytes)} in {counted(report.files, 'file')} of {report.source}"
        )
        click.echo(f"prove it: marlin-moe verify {dst} {src}")
        return
    per_second = round(report.packed_bytes / max(report.seconds, 1e-9))
    resumed = f", {counted(report.resumed_files, 'file')} from an earlier run" if report.resumed_files else ""
    click.echo(
        f"{dst}: {counted(report.layers, 'layer')}, {bytes_text(report.packed_bytes)} in "
        f"{counted(report.files, 'file')}{resumed}, {report.seconds:.1f} s, {bytes_text(per_second)}/s"
    )
    click.echo(f"prove it: marlin-moe verify {dst} {src}")
