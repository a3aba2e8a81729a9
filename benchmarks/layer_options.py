"""What the benchmarks of a layer are asked for: shapes, formats and numbers of tokens, with commas."""

from collections.abc import Sequence

import click
from layer_problems import FORMATS, SHAPES


def containing(context: click.Context, parameter: click.Parameter, value: str) -> tuple[str, ...]:
    """The shapes whose name contains one of the parts in `kimi,qwen3`."""
    parts = [part.strip() for part in value.split(",")]
    for part in parts:
        if not part or not any(part in name for name in SHAPES):
            raise click.BadParameter(f"expected parts of {', '.join(SHAPES)}, got {part!r}")
    return tuple(name for name in SHAPES if any(part in name for part in parts))


def names_of(known: Sequence[str], value: str | None) -> tuple[str, ...]:
    """The names in `a,b`, each of them known; none where there is no value."""
    if value is None:
        return ()
    names = tuple(dict.fromkeys(part.strip() for part in value.split(",")))
    for name in names:
        if name not in known:
            raise click.BadParameter(f"expected some of {', '.join(known)}, got {name!r}")
    return names


def numbers(context: click.Context, parameter: click.Parameter, value: str | None) -> tuple[int, ...]:
    """The numbers in `1,2,4`; none where there is no value."""
    try:
        found = tuple(int(part) for part in (value or "").split(",") if part.strip())
    except ValueError as error:
        raise click.BadParameter(f"expected numbers with commas, got {value!r}") from error
    if any(number < 1 for number in found):
        raise click.BadParameter(f"expected numbers from 1 on, got {value!r}")
    return found


def formats_of(context: click.Context, parameter: click.Parameter, value: str | None) -> tuple[str, ...]:
    """The weight formats in `int4,int8`; none where there is no value."""
    return names_of(list(FORMATS), value)
