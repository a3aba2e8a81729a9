"""How reports are printed: JSON, tables, quantities. Results go to stdout, everything else to stderr."""

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import click


def print_json(report: Mapping[str, Any]) -> None:
    """The report as JSON, and nothing else, on stdout."""
    click.echo(json.dumps(report, indent=2))


def print_table(
    columns: Sequence[str], rows: Sequence[Sequence[str]], *, numbers: Sequence[str] = ()
) -> None:
    """A table: drawn by rich on a terminal where it fits, plain aligned text elsewhere.

    Columns named in `numbers` are set right.
    """
    if sys.stdout.isatty() and _print_rich(columns, rows, numbers):
        return
    widths = [max(len(row[i]) for row in (columns, *rows)) for i in range(len(columns))]
    for row in (columns, *rows):
        cells = (
            cell.rjust(width) if name in numbers else cell.ljust(width)
            for cell, width, name in zip(row, widths, columns, strict=True)
        )
        click.echo("  ".join(cells).rstrip())


def _print_rich(columns: Sequence[str], rows: Sequence[Sequence[str]], numbers: Sequence[str]) -> bool:
    """Whether the table fits the terminal, and so was printed: cells broken over lines cannot be read."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for name in columns:
        table.add_column(name, justify="right" if name in numbers else "left", no_wrap=True)
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))  # a Text takes no markup from tensor names
    console = Console()
    unbounded = console.options.update(width=10_000)
    if console.measure(table, options=unbounded).maximum > console.width:
        return False
    console.print(table)
    return True


def bytes_text(count: int) -> str:
    """A count of bytes to three digits: `512 B`, `1.50 MB`, `63.4 GB`; units are powers of 1000."""
    size, unit = float(count), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if size < 999.5:
            break
        size, unit = size / 1000, larger
    if unit == "B":
        return f"{count} B"
    digits = 2 if size < 9.995 else 1 if size < 99.95 else 0
    return f"{size:.{digits}f} {unit}"


def counted(count: int, noun: str) -> str:
    """`1 layer`, `2 layers`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
