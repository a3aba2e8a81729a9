"""The key covers everything that can change the binary, and nothing else."""

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from marlin_moe.kernels.errors import JitError
from marlin_moe.kernels.jit import spec as spec_module
from marlin_moe.kernels.jit import toolkit as toolkit_module
from marlin_moe.kernels.jit.toolkit import installed_toolkit, toolkit_headers_digest
from tiny_kernel import tiny_spec, write_tiny


@pytest.mark.parametrize(
    "changes",
    [
        {"arch": "sm_90a"},
        {"constants": {"FACTOR": 4}},
        {"constants": {"FACTOR": True}},
        {"constants": {"FACTOR": 3, "OTHER": 0}},
        {"constants": {}, "defines": {"FACTOR": "3"}},
        {"kernels": ("tiny", "fill<3>")},
        {"max_registers": 32},
        {"fast_math": True},
        {"line_info": True},
        {"ptxas_options": ("-O2",)},
    ],
    ids=str,
)
def test_every_field_changes_the_key(tmp_path: Path, changes: dict[str, Any]) -> None:
    write_tiny(tmp_path)
    assert tiny_spec(tmp_path, **changes).key() != tiny_spec(tmp_path).key()


@pytest.mark.parametrize("name", ["tiny.cu", "inner/scale.cuh", "inner/deep.cuh", "top.cuh"])
def test_the_contents_of_every_file_change_the_key(tmp_path: Path, name: str) -> None:
    spec = tiny_spec(write_tiny(tmp_path))
    before = spec.key()
    (tmp_path / name).write_text((tmp_path / name).read_text() + "\n")
    assert spec.key() != before


def test_times_place_label_order_and_other_files_do_not(tmp_path: Path) -> None:
    here = write_tiny(tmp_path / "here")
    constants = {"FACTOR": 3, "ALSO": 1}
    spec = tiny_spec(here, constants=constants)
    before = spec.key()
    there = Path(shutil.copytree(here, tmp_path / "there"))
    os.utime(here / "tiny.cu", (1, 1))
    (here / "unused.cuh").write_text("changed")
    assert spec.key() == before
    assert tiny_spec(there, constants=constants).key() == before
    assert replace(spec, label="a name").key() == before
    assert tiny_spec(here, constants=tuple(reversed(constants.items()))) == spec


@pytest.mark.parametrize(
    "change",
    [
        lambda patch: patch.setattr(spec_module, "FORMAT_VERSION", 99),
        lambda patch: patch.setattr(
            spec_module, "installed_toolkit", lambda: replace(installed_toolkit(), build="CL-0")
        ),
        lambda patch: patch.setattr(
            spec_module, "installed_toolkit", lambda: replace(installed_toolkit(), version="13.0.1")
        ),
        lambda patch: patch.setattr(spec_module, "toolkit_headers_digest", lambda names: "0"),
    ],
    ids=["format", "build", "version", "headers"],
)
def test_the_toolkit_and_the_format_change_the_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[pytest.MonkeyPatch], None]
) -> None:
    spec = tiny_spec(write_tiny(tmp_path))
    before = spec.key()
    change(monkeypatch)
    assert spec.key() != before


def test_toolkit_headers_count_by_their_contents_wherever_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def digest(folder: Path) -> str:
        toolkit = replace(installed_toolkit(), include_folders=(str(folder),))
        monkeypatch.setattr(toolkit_module, "installed_toolkit", lambda: toolkit)
        return toolkit_headers_digest.__wrapped__(("a.h",))

    one, two = tmp_path / "one", tmp_path / "two"
    for folder in (one, two):
        (folder / "sub").mkdir(parents=True)
        (folder / "a.h").write_text("#ifdef NEVER\n#include <stdlib.h>\n#include <sub/b.h>\n#endif\n")
        (folder / "sub" / "b.h").write_text('#include "c.h"\n')
        (folder / "sub" / "c.h").write_text("1\n")
    before = digest(one)
    assert digest(two) == before
    (two / "sub" / "c.h").write_text("2\n")
    assert digest(two) != before


def test_the_toolkit_says_its_full_version() -> None:
    toolkit = installed_toolkit()
    assert toolkit.version.count(".") == 2
    assert toolkit.build.startswith("CL-")
    assert {80, 90} <= set(toolkit.compute_capabilities)


def test_the_prologue_has_every_constant_and_keeps_line_numbers(tmp_path: Path) -> None:
    constants = {"A": -5, "B": True, "C": 2**40}
    spec = tiny_spec(write_tiny(tmp_path), constants=constants, defines={"T": "float4"})
    assert spec.prologue.splitlines() == [
        "#define T float4",
        "constexpr int A = -5;",
        "constexpr bool B = true;",
        "constexpr long long C = 1099511627776;",
        '#line 1 "tiny.cu"',
    ]


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"arch": "90a"}, JitError, "arch: expected one like sm_80 or sm_90a, got '90a'"),
        ({"constants": {"A B": 1}}, JitError, "distinct C.. names for constants, got 'A B'"),
        ({"constants": {"A": 1}, "defines": {"A": "1"}}, JitError, "distinct C.. names.*got 'A'"),
        ({"constants": {"A": 1.5}}, TypeError, "constant A: expected a bool or int64, got 1.5"),
        ({"constants": {"A": 2**63}}, TypeError, "constant A: expected a bool or int64"),
        ({"defines": {"A": "1\n#include <x>"}}, TypeError, "define A: expected one line"),
        ({"kernels": ()}, TypeError, "kernels: expected a tuple of names"),
        ({"max_registers": 8}, JitError, "max_registers: expected 16 to 255, got 8"),
    ],
    ids=str,
)
def test_a_spec_is_checked(
    tmp_path: Path, changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        tiny_spec(write_tiny(tmp_path), **changes)
