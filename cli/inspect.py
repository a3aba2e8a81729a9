"""`marlin-moe inspect PATH`."""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from .options import json_option
from .output import bytes_text, counted, print_json, print_table

if TYPE_CHECKING:
    from ..repack.inspect_report import InspectReport, LayerReport


@click.command()
@click.argument("path", type=click.Path(path_type=Path))
@click.option(
    "--tp",
    metavar="N",
    type=click.IntRange(min=1),
    default=1,
    help="Split each intermediate size over N ranks.",
)
@click.option(
    "--ep", metavar="M", type=click.IntRange(min=1), default=1, help="Split the experts over M ranks."
)
@click.option("--follow-links", is_flag=True, help="Follow links that lead out of the directory.")
@json_option
def inspect(path: Path, tp: int, ep: int, follow_links: bool, as_json: bool) -> None:
    """Show the MoE layers of the checkpoint in PATH, and whether Marlin can run them.

    PATH is a directory with config.json and safetensors files, as downloaded, or one that `marlin-moe
    repack` wrote. Only headers and the beginnings of scales are read. For each layer: the sizes, the
    quantization, the bytes now and repacked, and the tensor-parallel sizes that work. Exit code 1 if a layer
    cannot be repacked, or not split as asked.

    \b
    Example:
      marlin-moe inspect Qwen3-30B-A3B-W4A16 --tp 4 --ep 2
    """
    from ..repack.errors import CheckpointError
    from ..repack.inspect import inspect_checkpoint

    report = inspect_checkpoint(path, tp=tp, ep=ep, follow_links=follow_links)
    if as_json:
        print_json(report.as_dict())
    else:
        _print(report, split=(tp, ep) != (1, 1))
    for warning in report.warnings:
        click.echo(f"warning: {warning}", err=True)
    if not report.ok:
        raise CheckpointError("\n".join([_headline(report), *report.problems]))


def _headline(report: "InspectReport") -> str:
    refused = {layer.module for layer in report.refused}
    refused |= {layer.module for layer in report.layers if not layer.split.fits}
    total = len(report.layers) + len(report.refused)
    if not total:
        return f"{report.path}: nothing to repack:"
    return f"{report.path}: {len(refused)} of {counted(total, 'layer')} cannot be repacked or split as asked:"


def _print(report: "InspectReport", *, split: bool) -> None:
    kind = "packed checkpoint, source" if report.packed else "checkpoint,"
    method = report.quant_method or "not quantized"
    size = f"{counted(report.num_files, 'file')}, {bytes_text(report.total_bytes)}"
    click.echo(f"{report.path}: {kind} {method}, {size}\n")
    _print_layers(report)
    if split:
        _print_split(report)
    _print_workspace(report)
    fused = sum(layer.fused for layer in report.layers)
    if fused:
        click.echo(f"stored as 3-D tensors that hold all experts: {counted(fused, 'layer')}")
    click.echo(
        f"carried over unchanged: {counted(report.carried_tensors, 'tensor')}, "
        f"{bytes_text(report.carried_bytes)}"
    )
    for plain in report.plain_layers:
        click.echo(
            f"  among them {plain.module}: {plain.num_experts} experts as plain {', '.join(plain.dtypes)}, "
            f"{bytes_text(plain.source_bytes)}"
        )
    for text, modules in _advice(report.layers).items():
        click.echo(f"{_which(modules, report.layers)}: {text}")


def _print_layers(report: "InspectReport") -> None:
    columns = (
        *("layer", "experts", "hidden", "intermediate", "bits", "group", "zero points", "act-order"),
        *("scales", "source" if report.packed else "now", "packed"),
    )
    rows = {layer.module: _row(layer) for layer in report.layers}
    for layer in report.refused:
        rows[layer.module] = (layer.module, "refused", *[""] * (len(columns) - 2))
    if not rows:
        return
    from ..repack.experts.find import natural

    ordered = [rows[module] for module in sorted(rows, key=natural)]
    ordered.append(
        (
            f"total: {counted(len(rows), 'layer')}",
            *[""] * (len(columns) - 3),
            bytes_text(sum(layer.source_bytes for layer in report.layers)),
            bytes_text(sum(layer.packed_bytes for layer in report.layers)),
        )
    )
    print_table(columns, ordered, numbers=("experts", "hidden", "now", "source", "packed"))
    click.echo()


def _row(layer: "LayerReport") -> tuple[str, ...]:
    w13, w2 = layer.w13, layer.w2
    size, padded = layer.intermediate_size, layer.padded_intermediate_size
    return (
        layer.module,
        str(layer.num_experts),
        str(layer.hidden_size),
        str(size) if size == padded else f"{size}, padded to {padded}",
        _both(_bits(w13.bits, layer.w13_source_bits), _bits(w2.bits, layer.w2_source_bits)),
        _both(_group(w13.group_size), _group(w2.group_size)),
        _both(*("no" if matrix.symmetric else "yes" for matrix in (w13, w2))),
        _both(*("yes" if matrix.act_order else "no" for matrix in (w13, w2))),
        layer.scales_dtype,
        bytes_text(layer.source_bytes),
        bytes_text(layer.packed_bytes),
    )


def _both(w13: object, w2: object) -> str:
    return str(w13) if w13 == w2 else f"w13 {w13}, w2 {w2}"


def _bits(bits: int, source_bits: int) -> str:
    return str(bits) if bits == source_bits else f"{bits}, widened from {source_bits}"


def _group(group_size: int | None) -> str:
    return "column" if group_size is None else str(group_size)


def _print_split(report: "InspectReport") -> None:
    """What the largest rank holds of each layer."""
    rows = []
    for layer in report.layers:
        split = layer.split
        if split.rank_bytes is None:
            rows.append((layer.module, "no", *[""] * 4))
            continue
        size, padded = split.intermediate_size, split.padded_intermediate_size
        regrouped = f", regrouped from {_group(layer.w2.group_size)}" if split.regrouped else ""
        rows.append(
            (
                layer.module,
                "yes",
                str(split.num_experts),
                str(size) if size == padded else f"{size}, padded to {padded}",
                _group(split.w2_group_size) + regrouped,
                bytes_text(split.rank_bytes),
            )
        )
    if rows:
        split = report.layers[0].split
        click.echo(f"split over tp={split.tp}, ep={split.ep}; the rank that holds most:")
        columns = ("layer", "fits", "experts", "intermediate", "w2 group", "bytes")
        print_table(columns, rows, numbers=("experts", "bytes"))
        click.echo()


def _print_workspace(report: "InspectReport") -> None:
    """The scratch that all layers of a device share: the largest plan."""
    from ..repack.inspect_report import MAX_TOKENS

    largest: dict[str, int] = {}
    for layer in report.layers:
        for backend, nbytes in layer.workspace_bytes.items():
            largest[backend] = max(nbytes, largest.get(backend, 0))
    if largest:
        sizes = ", ".join(f"{backend} {bytes_text(nbytes)}" for backend, nbytes in largest.items())
        click.echo(f"workspace that a rank's layers share, for {MAX_TOKENS:,} tokens: {sizes}")


def _advice(layers: Iterable["LayerReport"]) -> dict[str, list[str]]:
    """What splits work -> the layers of which that is true."""
    advice: dict[str, list[str]] = {}
    for layer in layers:
        sizes = ", ".join(map(str, layer.split.tp_sizes))
        text = f"TP sizes that work: {sizes}; EP up to {layer.split.max_ep}"
        advice.setdefault(text, []).append(layer.module)
    return advice


def _which(modules: list[str], layers: tuple["LayerReport", ...]) -> str:
    if len(modules) == len(layers):
        return "every layer"
    return modules[0] + (f" and {counted(len(modules) - 1, 'other')}" if len(modules) > 1 else "")
