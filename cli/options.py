"""Options that several commands have, and values that they check."""

import os
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    import torch

json_option = click.option("--json", "as_json", is_flag=True, help="Print the report as JSON, and only that.")


def usable_device(context: click.Context, parameter: click.Parameter, value: str) -> "torch.device":
    """The torch device called `value` (`cpu`, `cuda`, `cuda:1`), after a first allocation on it.

    Under torchrun `cuda` is a GPU of this process's own: the one of its LOCAL_RANK, in turn where there are
    fewer.

    Raises:
        click.BadParameter: this machine has none; the text says why.
    """
    import torch

    try:
        device = torch.device(value)
        rank = os.environ.get("LOCAL_RANK", "")
        if value == "cuda" and rank.isdecimal():
            device = torch.device("cuda", int(rank) % max(1, torch.cuda.device_count()))
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise click.BadParameter(f"{value!r} cannot be used: {str(error).splitlines()[0]}") from error
    if device.type == "meta":
        raise click.BadParameter("'meta' cannot be used: it holds no values")
    return device
