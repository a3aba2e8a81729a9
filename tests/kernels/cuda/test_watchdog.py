"""The watchdog of the GPU tests: a body that fails or hangs in its child is a failure that says where."""

import os
import time

import pytest

from child import in_child


@in_child(timeout_s=120)
def test_a_body_runs_in_another_process() -> None:
    assert os.environ.get("PYTEST_CURRENT_TEST")  # inherited
    print("pid", os.getpid())


@in_child(timeout_s=120)
def failing(*, number: int) -> None:
    assert number == 3, f"number is {number}"


@in_child(timeout_s=2)
def hanging() -> None:
    time.sleep(60)


def test_a_failure_is_reported_with_its_text() -> None:
    failing(number=3)
    with pytest.raises(AssertionError, match=r"(?s)failing: exit code 1.*number is 4"):
        failing(number=4)


def test_a_hang_is_reported_with_its_place() -> None:
    started = time.monotonic()
    with pytest.raises(
        AssertionError, match=r"(?s)hanging: exit code 1.*Timeout.*test_watchdog\.py.*hanging"
    ):
        hanging()
    assert time.monotonic() - started < 30
