"""What holds for every command: it is documented, says an example, and never shows a traceback."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from checkpoints import write_checkpoint
from marlin_moe.cli.commands import COMMANDS
from marlin_moe.cli.main import main
from mutations import truncate
from tree import ROOT, run_python

README = (ROOT / "README.md").read_text()


def command_named(name: str) -> click.Command:
    """`kernels build` is the command build of the group kernels."""
    command: click.Command | None = main
    for part in name.split():
        assert isinstance(command, click.Group)
        command = command.get_command(click.Context(command), part)
    assert command is not None
    return command


def names() -> Iterator[str]:
    """Every command that does something; a group is named by its own commands."""
    for name in sorted(COMMANDS):
        command = command_named(name)
        yield from (
            [f"{name} {own}" for own in command.commands] if isinstance(command, click.Group) else [name]
        )


NAMES = list(names())


@pytest.mark.parametrize("name", NAMES)
def test_the_readme_names_every_command(name: str) -> None:
    assert f"marlin-moe {name}" in README


def test_the_readme_names_no_other_command() -> None:
    assert set(re.findall(r"^\s*marlin-moe (\w+)", README, re.MULTILINE)) <= COMMANDS.keys()


@pytest.mark.parametrize("name", NAMES)
def test_every_command_shows_an_example_of_itself(name: str) -> None:
    command = command_named(name)
    assert command.help is not None
    example = command.help.rpartition("Example:\n")[2].strip()
    assert example.startswith(f"marlin-moe {name}")
    arguments = example.split()[1 + len(name.split()) :]
    context = command.make_context(name, arguments, resilient_parsing=False)  # it parses as written
    assert context.params["as_json"] is False


@pytest.mark.parametrize("name", NAMES)
def test_every_command_reports_as_json(name: str) -> None:
    command = command_named(name)
    assert any("--json" in parameter.opts for parameter in command.params)


def test_a_broken_checkpoint_ends_in_a_report_and_exit_1(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "source")
    truncate(tmp_path / "source" / "model.safetensors", 1000)
    result = run_python("-m", "marlin_moe.cli", "repack", str(tmp_path / "source"), str(tmp_path / "packed"))
    assert (result.returncode, result.stdout) == (1, "")
    assert "Traceback" not in result.stderr
    assert re.match(r"error: .*model\.safetensors", result.stderr.splitlines()[-1])


def test_json_on_stdout_is_pure(tmp_path: Path) -> None:
    """A pipe gets JSON even where a warning is said."""
    write_checkpoint(tmp_path, hidden_size=192)
    result = run_python("-m", "marlin_moe.cli", "inspect", str(tmp_path), "--json")
    assert result.returncode == 0
    assert json.loads(result.stdout)["ok"] is True
    assert result.stderr.startswith("warning: hidden size 192")


def test_a_reader_that_goes_away_is_no_traceback(tmp_path: Path) -> None:
    command = f"{sys.executable} -m marlin_moe.cli doctor | true"
    result = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, check=False, cwd=tmp_path, timeout=120
    )
    assert result.stderr == ""
