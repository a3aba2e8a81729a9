"""A test body in a process of its own, under a watchdog: `in_child`.

What hangs on a GPU cannot be interrupted from inside, and what is wrong there spoils the whole process; so a
body that may do either runs in a child, whose end is a failure with the place where it stood.
"""

from __future__ import annotations

import faulthandler
import functools
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

GRACE_S = 10
"""Between the child's own traceback and its end by force."""


def in_child(*, timeout_s: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorator: the test runs in a fresh interpreter; its arguments must be JSON, its file importable alone.

    The test fails with what the child printed where it fails, and with its stack where it does not end.
    """

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(body)
        def test(**arguments: object) -> None:
            run_in_child(Path(body.__code__.co_filename), body.__qualname__, arguments, timeout_s=timeout_s)

        return test

    return decorate


def run_in_child(file: Path, name: str, arguments: dict[str, object], *, timeout_s: int) -> None:
    """Call `name` of the module in `file`; AssertionError where it fails or takes longer."""
    call = json.dumps(
        {"file": str(file.resolve()), "name": name, "arguments": arguments, "seconds": timeout_s}
    )
    command = [sys.executable, str(Path(__file__).resolve()), call]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    )
    try:
        output, _ = process.communicate(timeout=timeout_s + GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        output, _ = process.communicate()
        raise AssertionError(f"{name}: no end after {timeout_s} s, and killed\n{output[-6000:]}") from None
    if process.returncode:
        raise AssertionError(f"{name}: exit code {process.returncode}\n{output[-6000:]}")
    sys.stdout.write(output)


def main(call: str) -> None:
    """In the child: import the file and call the body, with the stack on stderr when time is up."""
    what = json.loads(call)
    faulthandler.dump_traceback_later(what["seconds"], exit=True)
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    from places import hide_cuda_compiler, on_triton

    if on_triton():
        hide_cuda_compiler()
    spec = importlib.util.spec_from_file_location(Path(what["file"]).stem, what["file"])
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    getattr(module, what["name"]).__wrapped__(**what["arguments"])
    faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    main(sys.argv[1])
