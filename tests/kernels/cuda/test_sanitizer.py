"""compute-sanitizer over small calls: no access out of bounds, no race in shared memory."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SMALL = Path(__file__).resolve().parent / "small.py"
TIMEOUT_S = 240
FOUND = 9

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_the_sanitizer_finds_nothing(tool: str) -> None:
    sanitizer = shutil.which("compute-sanitizer") or shutil.which("/usr/local/cuda/bin/compute-sanitizer")
    if sanitizer is None:
        pytest.skip("compute-sanitizer of the CUDA toolkit is not installed")
    # The bindings ask the driver for entry points that it may lack, which is no error of ours.
    quiet = ["--report-api-errors", "no"] if tool == "memcheck" else []
    command = [sanitizer, "--tool", tool, *quiet, "--error-exitcode", str(FOUND), sys.executable, str(SMALL)]
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}  # every tensor has bounds of its own
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, env=environment)
    except subprocess.TimeoutExpired as error:
        pytest.fail(f"{tool}: no end after {TIMEOUT_S} s\n{error.stdout!r}")
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    assert done.stdout.count("right:") == 7, done.stdout
    assert "ERROR SUMMARY: 0 errors" in done.stdout or "0 hazards" in done.stdout, done.stdout[-2000:]
