"""The documentation names what is there: tests, commands, flags and links."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from marlin_moe.cli.main import main
from pages import PAGES, page_name
from tree import ROOT, package_files

TEST = re.compile(r"\[(?P<file>[\w/]+\.py)::(?P<name>\w+)\]\((?P<link>[^)]+)\)")

VARIABLE = re.compile(r"MARLIN_MOE_[A-Z]+")


def commands(page: Path) -> Iterator[list[str]]:
    """Every `marlin-moe …` of code blocks and of inline code, as words."""
    text = page.read_text()
    inline = re.findall(r"`(marlin-moe [^`\n]+)`", text)
    blocks = re.findall(r"^```(?:bash|sh|console)\n(.*?)^```", text, flags=re.M | re.S)
    lines = [line for block in blocks for line in block.splitlines()]
    for line in [*inline, *(line.removeprefix("$ ") for line in lines)]:
        words = shlex.split(line, comments=True)
        if words[:1] == ["marlin-moe"]:
            yield words[1:]


def problem(words: list[str]) -> str | None:
    """What of a command line is unknown, or None."""
    command: click.Command = main
    context = click.Context(main)
    while words and isinstance(command, click.Group) and not words[0].startswith("-"):
        found = command.get_command(context, words[0])
        if found is None:
            return f"no command {words[0]}"
        command, words = found, words[1:]
    known = {flag for parameter in command.params for flag in (*parameter.opts, *parameter.secondary_opts)}
    known |= {"--help", "-h"}
    unknown = [word for word in words if word.startswith("-") and word.split("=")[0] not in known]
    return f"{command.name}: no flag {unknown[0]}" if unknown else None


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_every_test_that_is_named_exists(page: Path) -> None:
    named = list(TEST.finditer(page.read_text()))
    assert named or page.name != "formats.md"
    for match in named:
        file = (page.parent / match["link"]).resolve()
        assert file.is_file(), match[0]
        assert file.as_posix().endswith(f"/{match['file']}"), match[0]
        functions = [
            node.name for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.FunctionDef)
        ]
        assert match["name"] in functions, match[0]
        assert match["name"].startswith("test_"), match[0]


def test_no_row_of_the_formats_is_without_a_test() -> None:
    rows = [line for line in (ROOT / "docs" / "formats.md").read_text().splitlines() if line.startswith("| ")]
    bare = [row for row in rows if not TEST.search(row) and not row.endswith("| test |")]
    assert not bare
    assert len(rows) > 50


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_every_command_that_is_shown_is_one(page: Path) -> None:
    found = {" ".join(words): problem(words) for words in commands(page)}
    assert not {line: text for line, text in found.items() if text}
    assert found or page.name != "README.md"


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_every_link_to_a_file_leads_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text()):
        assert (page.parent / link).exists(), link


def test_the_table_of_variables_is_what_the_package_reads() -> None:
    """A variable's name is a string of its own in the code that reads it."""
    trees = [ast.parse((ROOT / path).read_text()) for path in package_files()]
    read = {
        node.value
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and VARIABLE.fullmatch(node.value)
    }
    rows = re.findall(r"^\| `(\w+)` \| .+ \| .+ \|$", (ROOT / "README.md").read_text(), flags=re.M)
    assert sorted(rows) == sorted(read)
    assert len(read) > 2


@pytest.mark.parametrize(
    "words", [["pack", "SRC"], ["repack", "SRC", "DST", "--fast"], ["inspect", "X", "--tp=2", "-q"]]
)
def test_what_is_no_command_is_seen(words: list[str]) -> None:
    assert problem(words)
