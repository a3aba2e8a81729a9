"""The command `marlin-moe`: a group whose commands are imported when they are called."""

from typing import Any

import click

from .commands import COMMANDS, load_command
from .report import reported


class LazyGroup(click.Group):
    """Lists the commands from the table, imports the one that is called, and reports its errors."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The names of the table, in its order."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command, imported now."""
        return load_command(cmd_name)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The table's help lines, so that `--help` imports no command."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, entry.summary) for name, entry in COMMANDS.items()])

    def invoke(self, ctx: click.Context) -> Any:
        """Runs the command that was called; its errors become a report and an exit code."""
        with reported():
            return super().invoke(ctx)


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="marlin-moe", message="%(prog)s %(version)s")
def main() -> None:
    """Repack quantized Mixture-of-Experts checkpoints for the Marlin op, offline and proved right.

    Exit code 0: done. 1: the check failed or the input is bad; the report is on stderr and its last line sums
    it up. 2: wrong flags.
    """
