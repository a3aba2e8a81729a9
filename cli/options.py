"""Options that several commands have, and values that they check."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    import torch

json_option = click.option("--json", "as_json", is_flag=True, help="Print the report as JSON, and only that.")


class OutputFile(click.Path):
    """The path of a file to write at the end, refused before the work where no file can be written there.

    `suffixes`: those that its name may end in; another one is a wrong flag (exit code 2).
    """

    def __init__(self, suffixes: Sequence[str] = ()) -> None:
        super().__init__(dir_okay=False, writable=True, path_type=Path)
        self.suffixes = tuple(suffixes)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        """The path.

        Raises:
            click.UsageError: another suffix.
            click.BadParameter: a directory; a file or folder that cannot be written; no such folder.
        """
        path = Path(value)
        if self.suffixes and path.suffix not in self.suffixes:
            raise click.UsageError(
                f"{'' if param is None else param.opts[-1]}: expected a name that ends in "
                f"{' or '.join(self.suffixes)}, which can be drawn, got {str(path)!r}.",
                ctx,
            )
        super().convert(value, param, ctx)
        folder = path.resolve().parent
        if not folder.is_dir():
            self.fail(f"{path}: expected a file that can be written, got no folder {folder}.", param, ctx)
        if not path.exists() and not os.access(folder, os.W_OK | os.X_OK):
            self.fail(f"{path}: expected a file that can be written, got a read-only {folder}.", param, ctx)
        return path


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
