"""What a command says when it cannot go on: a report on stderr whose last line sums it up, and an exit code.

1    the check failed or the input is bad, a missing path among it
2    wrong flags (click's own)
130  interrupted; 143 by SIGTERM, 129 by SIGHUP, where a command has something to remove
"""

import errno
import signal
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn, TextIO

import click

from ..kernels.errors import MarlinMoEError, MarlinMoEWarning

EXIT_BAD_INPUT = 1
EXIT_SIGNAL = 128
"""Added to the number of the signal that ended a command, as a shell does."""
ENDING_SIGNALS = (signal.SIGTERM, signal.SIGHUP)


class Ended(KeyboardInterrupt):
    """A signal came that would have ended the process at once."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


@contextmanager
def ended_in_order() -> Iterator[None]:
    """SIGTERM and SIGHUP stop the body as Ctrl-C does, so that it removes what it wrote for a while.

    Further ones do not disturb that. One that is ignored, as under nohup, stays so.
    """

    def stop(number: int, frame: FrameType | None) -> None:
        for one in taken:
            signal.signal(one, signal.SIG_IGN)
        raise Ended(number)

    taken = [one for one in ENDING_SIGNALS if signal.getsignal(one) is signal.SIG_DFL]
    for one in taken:
        signal.signal(one, stop)
    try:
        yield
    finally:
        for one in taken:
            signal.signal(one, signal.SIG_DFL)


@contextmanager
def reported() -> Iterator[None]:
    """Errors of the library and the system become a report and an exit code, warnings one line each.

    An error that is none of these is a defect of the program and keeps its traceback.
    """
    with _warnings_on_stderr():
        try:
            yield
        except MarlinMoEError as error:
            _fail(str(error), EXIT_BAD_INPUT)
        except click.BadParameter as error:
            if isinstance(error, click.MissingParameter) or not _names_a_path(error):
                raise
            _fail(error.message, EXIT_BAD_INPUT)  # the flags were right, what they name is not
        except OSError as error:
            if error.errno == errno.EPIPE:
                raise  # the reader of our output has gone; click ends quietly
            _fail(system_error_text(error), EXIT_BAD_INPUT)
        except Ended as error:
            _fail(f"interrupted by {signal.Signals(error.number).name}", EXIT_SIGNAL + error.number)
        except KeyboardInterrupt:
            _fail("interrupted", EXIT_SIGNAL + signal.SIGINT)


def _names_a_path(error: click.BadParameter) -> bool:
    return error.param is not None and isinstance(error.param.type, click.Path)


def system_error_text(error: OSError) -> str:
    """`path: what the system says (its name for it)`, or the error's own text where it has no errno."""
    if error.errno is None:
        return str(error) or type(error).__name__
    paths = [str(path) for path in (error.filename, error.filename2) if path is not None]
    code = errno.errorcode.get(error.errno, f"errno {error.errno}")
    return f"{' -> '.join(paths) + ': ' if paths else ''}{error.strerror} ({code})"


def _fail(report: str, code: int) -> NoReturn:
    """Prints the report and exits. The first line of a long one is its headline, said again at the end."""
    headline, *details = report.strip().splitlines() or ["failed"]
    if details:
        print(report.strip(), file=sys.stderr)
    print(f"error: {headline.rstrip(':')}", file=sys.stderr)
    raise click.exceptions.Exit(code)


@contextmanager
def _warnings_on_stderr() -> Iterator[None]:
    """A `MarlinMoEWarning` is one line on stderr, once per text, whatever the interpreter's filters are."""
    said: set[str] = set()
    show_other = warnings.showwarning

    def show(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        if not issubclass(category, MarlinMoEWarning):
            show_other(message, category, filename, lineno, file, line)
            return
        text = " ".join(str(message).split())
        if text not in said:
            said.add(text)
            print(f"warning: {text}", file=sys.stderr)

    with warnings.catch_warnings():
        warnings.simplefilter("always", MarlinMoEWarning)
        warnings.showwarning = show
        yield
