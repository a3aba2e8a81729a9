"""The frame of the command: help, exit codes and reports, tried with a small command of the test's own."""

import errno
import signal
import subprocess
import sys
import types
import warnings
from collections.abc import Callable

import click
import pytest
from click.testing import CliRunner, Result

from marlin_moe.cli.commands import COMMANDS, CommandEntry
from marlin_moe.cli.main import main
from marlin_moe.cli.report import ended_in_order
from marlin_moe.kernels.errors import LayoutError, MarlinMoEError, MarlinMoEWarning
from tree import run_python

RunBody = Callable[[Callable[[], None]], Result]


def register(monkeypatch: pytest.MonkeyPatch, command: click.Command) -> None:
    """Adds a command `probe` to the table, in a module of its own."""
    module = types.ModuleType("marlin_moe.cli.probe")
    module.probe = command  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "marlin_moe.cli.probe", module)
    monkeypatch.setitem(
        COMMANDS, "probe", CommandEntry(module=".probe", attribute="probe", summary="Probe it.")
    )


@pytest.fixture
def run_body(monkeypatch: pytest.MonkeyPatch) -> RunBody:
    """Runs `marlin-moe probe` with the given body."""

    def run(body: Callable[[], None]) -> Result:
        register(monkeypatch, click.Command("probe", callback=body))
        return CliRunner().invoke(main, ["probe"])

    return run


def raising(error: BaseException) -> Callable[[], None]:
    def body() -> None:
        raise error

    return body


def test_help_lists_every_command_with_its_line() -> None:
    result = CliRunner().invoke(main, ["--help"], terminal_width=110)
    assert result.exit_code == 0
    for name, entry in COMMANDS.items():
        assert f"{name}  {' ' * (max(map(len, COMMANDS)) - len(name))}{entry.summary}" in result.stdout


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_command_of_the_table_exists_and_has_help(name: str) -> None:
    command = main.get_command(click.Context(main), name)
    assert command is not None
    assert command.name == name
    assert command.help
    for parameter in command.params:
        if isinstance(parameter, click.Option):
            assert parameter.help, f"{name} {parameter.opts[0]} has no help"


def test_a_command_that_ends_well_exits_0(run_body: RunBody) -> None:
    result = run_body(lambda: click.echo("done"))
    assert (result.exit_code, result.stdout, result.stderr) == (0, "done\n", "")


def test_the_exit_code_of_a_command_is_kept(run_body: RunBody) -> None:
    result = run_body(raising(click.exceptions.Exit(1)))
    assert (result.exit_code, result.stdout, result.stderr) == (1, "", "")


def test_a_library_error_of_one_line_is_its_own_summary(run_body: RunBody) -> None:
    result = run_body(raising(LayoutError("a.qweight: expected int32, got int64")))
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == "error: a.qweight: expected int32, got int64\n"


def test_a_long_report_is_printed_whole_and_summed_up_at_its_end(run_body: RunBody) -> None:
    report = "model.layers.3.mlp.experts: 2 problems:\n  7.gate_proj: no scale\n  9.up_proj: no scale"
    result = run_body(raising(MarlinMoEError(report)))
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == f"{report}\nerror: model.layers.3.mlp.experts: 2 problems\n"


def test_a_system_error_names_the_path_and_the_cause(run_body: RunBody) -> None:
    result = run_body(lambda: open("/no/such/file").close())
    assert result.exit_code == 1
    assert result.stderr == "error: /no/such/file: No such file or directory (ENOENT)\n"


def test_a_system_error_without_a_path_says_the_cause(run_body: RunBody) -> None:
    result = run_body(raising(OSError(errno.ENOSPC, "No space left on device")))
    assert (result.exit_code, result.stderr) == (1, "error: No space left on device (ENOSPC)\n")


def test_a_system_error_of_two_paths_names_both(run_body: RunBody) -> None:
    result = run_body(raising(OSError(errno.EXDEV, "Invalid cross-device link", "/a", None, "/b")))
    assert (result.exit_code, result.stderr) == (1, "error: /a -> /b: Invalid cross-device link (EXDEV)\n")


def test_a_system_error_without_errno_keeps_its_text(run_body: RunBody) -> None:
    result = run_body(raising(OSError("cannot reach it")))
    assert (result.exit_code, result.stderr) == (1, "error: cannot reach it\n")


def test_a_reader_that_goes_away_is_no_report(run_body: RunBody) -> None:
    result = run_body(raising(BrokenPipeError(errno.EPIPE, "Broken pipe")))
    assert (result.exit_code, result.stderr) == (1, "")


def test_an_interrupt_exits_130(run_body: RunBody) -> None:
    result = run_body(raising(KeyboardInterrupt()))
    assert (result.exit_code, result.stderr) == (130, "error: interrupted\n")


def test_a_defect_keeps_its_traceback(run_body: RunBody) -> None:
    result = run_body(raising(ZeroDivisionError("a defect")))
    assert isinstance(result.exception, ZeroDivisionError)


def test_warnings_are_one_line_each_and_said_once(run_body: RunBody) -> None:
    def body() -> None:
        for text in (
            "layer 3 is slow:\n  a group is cut",
            "layer 4 is slow",
            "layer 3 is slow:\n  a group is cut",
        ):
            warnings.warn(text, MarlinMoEWarning, stacklevel=1)

    result = run_body(body)
    assert result.exit_code == 0
    assert result.stderr == "warning: layer 3 is slow: a group is cut\nwarning: layer 4 is slow\n"


def test_other_warnings_go_their_usual_way(run_body: RunBody) -> None:
    with pytest.warns(FutureWarning, match="of another library"):
        result = run_body(lambda: warnings.warn("of another library", FutureWarning, stacklevel=1))
    assert (result.exit_code, result.stderr) == (0, "")


@pytest.fixture
def with_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    path, count = click.Argument(["path"], type=click.Path(exists=True)), click.Option(["--count"], type=int)
    register(monkeypatch, click.Command("probe", params=[path, count], callback=lambda path, count: None))


@pytest.mark.usefixtures("with_arguments")
def test_a_missing_path_is_bad_input_not_a_wrong_flag() -> None:
    result = CliRunner().invoke(main, ["probe", "/no/such/checkpoint"])
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == "error: Path '/no/such/checkpoint' does not exist.\n"


@pytest.mark.usefixtures("with_arguments")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["probe"], "Missing argument 'PATH'"),
        (["probe", ".", "--count", "many"], "'many' is not a valid integer"),
        (["probe", ".", "--cuont", "1"], "No such option"),
        (["porbe", "."], "No such command 'porbe'"),
        (["--no-such-flag"], "No such option"),
    ],
)
def test_wrong_flags_exit_2(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 2
    assert message in result.stderr


def test_module_and_script_are_the_same_command() -> None:
    script = run_python("-c", "import sysconfig; print(sysconfig.get_path('scripts'))").stdout.strip()
    command = [f"{script}/marlin-moe", "--help"]
    of_script = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    of_module = run_python("-m", "marlin_moe.cli", "--help")
    assert of_module.returncode == 0, of_module.stderr
    assert of_script.startswith("Usage: marlin-moe ")
    assert of_module.stdout == of_script


def test_version_is_printed() -> None:
    result = CliRunner().invoke(main, ["--version"], prog_name="marlin-moe")
    assert (result.exit_code, result.stdout) == (0, "marlin-moe 0.1.0\n")


def test_a_signal_that_ends_commands_stops_the_body_once(run_body: RunBody) -> None:
    """The handlers are as before afterwards."""
    cleaned = []

    def body() -> None:
        with ended_in_order():
            try:
                signal.raise_signal(signal.SIGTERM)
            finally:
                signal.raise_signal(signal.SIGHUP)
                cleaned.append(True)

    result = run_body(body)
    assert (result.exit_code, result.stderr) == (143, "error: interrupted by SIGTERM\n")
    assert cleaned
    assert signal.getsignal(signal.SIGTERM) is signal.getsignal(signal.SIGHUP) is signal.SIG_DFL


def test_a_signal_that_is_ignored_stays_so(run_body: RunBody) -> None:
    """As nohup has it."""

    def body() -> None:
        with ended_in_order():
            signal.raise_signal(signal.SIGHUP)
            click.echo("done")

    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        result = run_body(body)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert (result.exit_code, result.stdout) == (0, "done\n")
