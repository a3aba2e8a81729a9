"""The README and the pages of docs/, and the code blocks in them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from tree import ROOT

PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("**/*.md")])
FENCE = re.compile(r"^```(?P<info>[^\n]*)\n(?P<text>.*?)^```", flags=re.M | re.S)


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A code block: its language, whether it needs a GPU (`python gpu`), and its text."""

    language: str
    gpu: bool
    text: str


def page_name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks(page: Path) -> list[Block]:
    """All code blocks of a page, in order."""
    found = []
    for match in FENCE.finditer(page.read_text()):
        words = match["info"].split()
        found.append(Block(language=words[0] if words else "", gpu="gpu" in words[1:], text=match["text"]))
    return found


def run_python(page: Path, text: str, names: dict[str, object]) -> None:
    """Run a block in a namespace; a failure names the page."""
    exec(compile(text, page_name(page), "exec"), names)
