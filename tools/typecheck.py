"""Runs mypy on an installed copy of the package, outside the checkout, and counts the files it read.

In the checkout the folders are not yet the package `marlin_moe`: mypy would follow no relative import and
would take `kernels` for another distribution. So a copy is installed into a temporary directory and mypy runs
there; the run fails if mypy read fewer files than the folders hold.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("api", "kernels", "repack", "cli", "bench", "integrations")
BUILD_FILES = ("pyproject.toml", "setup.py", "README.md", "LICENSE")
CHECKED = re.compile(r"(?:no issues found in|checked) (\d+) source files?")


def install_copy(work: Path) -> Path:
    """Installs the package from a copy of its sources, without dependencies; returns where it is."""
    source, target = work / "source", work / "installed"
    source.mkdir()
    for name in BUILD_FILES:
        shutil.copy2(ROOT / name, source)
    for name in FOLDERS:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "--target", str(target), str(source)], check=True)
    return target


def main() -> int:
    """Type-checks the package; 0 when there is nothing to complain about and no file was missed."""
    expected = sum(1 for folder in FOLDERS for _ in (ROOT / folder).rglob("*.py"))
    with tempfile.TemporaryDirectory(prefix="marlin-moe-types-") as work:
        target = install_copy(Path(work))
        command = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml")]
        command += ["--cache-dir", str(ROOT / ".mypy_cache"), "-p", "marlin_moe"]
        environment = os.environ | {"MYPYPATH": str(target)}
        result = subprocess.run(
            command, cwd=target, env=environment, stdout=subprocess.PIPE, text=True, check=False
        )
    print(result.stdout, end="")
    count = CHECKED.search(result.stdout)
    if count is None:
        print("typecheck: mypy did not say how many files it read", file=sys.stderr)
        return result.returncode or 1
    if int(count[1]) < expected:
        print(f"typecheck: mypy read {count[1]} files, the tree has {expected}", file=sys.stderr)
        return 1
    return result.returncode


if __name__ == "__main__":
    sys.exit(main())
