"""How reports are printed: quantities and tables."""

import io
import sys

import pytest

from marlin_moe.cli.output import bytes_text, counted, print_json, print_table


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.00 kB"),
        (9_994, "9.99 kB"),
        (9_996, "10.0 kB"),
        (99_960, "100 kB"),
        (999_400, "999 kB"),
        (999_600, "1.00 MB"),
        (63_400_000_000, "63.4 GB"),
        (12_000_000_000_000_000, "12000 TB"),
    ],
)
def test_bytes_have_three_digits(count: int, text: str) -> None:
    assert bytes_text(count) == text


def test_nouns_are_counted() -> None:
    assert [counted(n, "layer") for n in (0, 1, 2, 1200)] == [
        "0 layers",
        "1 layer",
        "2 layers",
        "1,200 layers",
    ]


def test_json_is_indented_and_ends_with_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"a": (1, None)})
    assert capsys.readouterr().out == '{\n  "a": [\n    1,\n    null\n  ]\n}\n'


def test_a_table_is_aligned_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(
        ("layer", "bytes", "note"), [("a", "5", "x"), ("longer name", "1000", "")], numbers=("bytes",)
    )
    assert capsys.readouterr().out.splitlines() == [
        "layer        bytes  note",
        "a                5  x",
        "longer name   1000",
    ]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_table_is_drawn_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every cell is there in its row, and brackets in a tensor's name are no markup."""
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("COLUMNS", "100")
    print_table(("layer", "bytes"), [("model.[bold]x", "17"), ("b", "2")], numbers=("bytes",))
    lines = [line for line in terminal.getvalue().splitlines() if line.strip()]
    rows = [" ".join(line.split()) for line in lines]
    assert any("model.[bold]x 17" in row for row in rows), rows
    assert any("─" in row for row in rows), rows


def test_a_table_too_wide_for_the_terminal_is_plain_and_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("COLUMNS", "30")
    print_table(("layer", "bytes"), [("model.layers.0.mlp.experts", "17")])
    assert terminal.getvalue().splitlines() == [
        "layer                       bytes",
        "model.layers.0.mlp.experts  17",
    ]
