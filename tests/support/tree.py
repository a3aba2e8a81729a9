"""The package as it lies on disk: folders, files as git knows them, and a fresh interpreter to try it."""

import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = {
    "api": "marlin_moe",
    "kernels": "marlin_moe.kernels",
    "repack": "marlin_moe.repack",
    "cli": "marlin_moe.cli",
    "bench": "marlin_moe.bench",
    "integrations": "marlin_moe.integrations",
}


def git_files(*folders: str) -> list[PurePosixPath]:
    """Files that git tracks or would track, relative to the root, without those deleted on disk."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z", "--", *folders]
    listing = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return sorted({PurePosixPath(name) for name in listing.split("\0") if name and (ROOT / name).is_file()})


def package_files(suffixes: Iterable[str] = (".py",)) -> list[PurePosixPath]:
    """The package's files with these suffixes, relative to the root."""
    wanted = set(suffixes)
    return [path for path in git_files(*FOLDERS) if path.suffix in wanted]


def installed_path(path: PurePosixPath) -> PurePosixPath:
    """Where a file of the tree lies in site-packages: `repack/load.py` -> `marlin_moe/repack/load.py`."""
    return PurePosixPath(*FOLDERS[path.parts[0]].split("."), *path.parts[1:])


def module_name(path: PurePosixPath) -> str:
    """What a file is imported as: `repack/stages/__init__.py` -> `marlin_moe.repack.stages`."""
    parts = installed_path(path).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def run_python(*arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Runs a fresh interpreter, at the root of the checkout unless told otherwise; its output as text."""
    environment = os.environ | {"PYTHONSAFEPATH": "1"}
    command = [sys.executable, *arguments]
    return subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, check=False, timeout=300
    )
