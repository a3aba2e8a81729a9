"""The wheel holds what git knows of the package, no more and no less."""

import shutil
import zipfile
from pathlib import Path, PurePosixPath

import pytest

from tree import FOLDERS, ROOT, git_files, installed_path, package_files, run_python

SUFFIXES = (".py", ".typed", ".cu", ".cuh", ".h", ".c")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel of a copy of the files that git knows, so that nothing left in the checkout leaks in."""
    work = tmp_path_factory.mktemp("wheel")
    for path in git_files(*FOLDERS, "pyproject.toml", "setup.py", "README.md", "LICENSE"):
        target = work / "source" / path
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / path, target)
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(work)]
    result = run_python("-m", "pip", "wheel", *options, str(work / "source"))
    assert result.returncode == 0, result.stderr
    (built,) = work.glob("*.whl")
    return built


def members(wheel: Path) -> set[PurePosixPath]:
    with zipfile.ZipFile(wheel) as archive:
        return {PurePosixPath(name) for name in archive.namelist()}


def test_wheel_holds_the_files_that_git_knows(wheel: Path) -> None:
    packed = {path for path in members(wheel) if path.parts[0] == "marlin_moe" and path.suffix != ".so"}
    expected = {installed_path(path) for path in package_files(SUFFIXES)}
    assert {PurePosixPath("marlin_moe/__init__.py"), PurePosixPath("marlin_moe/py.typed")} <= expected
    assert packed == expected


def test_wheel_holds_nothing_beside_the_package_and_its_metadata(wheel: Path) -> None:
    assert {path.parts[0] for path in members(wheel)} == {"marlin_moe", "marlin_moe-0.1.0.dist-info"}


def test_wheel_carries_licence_and_command(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        assert archive.read("marlin_moe-0.1.0.dist-info/licenses/LICENSE") == (ROOT / "LICENSE").read_bytes()
        entry_points = archive.read("marlin_moe-0.1.0.dist-info/entry_points.txt").decode()
    assert "marlin-moe = marlin_moe.cli.main:main" in entry_points


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_one_binary_serves_every_python(wheel: Path) -> None:
    binaries = [str(path) for path in members(wheel) if path.suffix == ".so"]
    assert binaries == ["marlin_moe/repack/native/_native.abi3.so"]
    assert "-cp311-abi3-" in wheel.name
