"""What is decided about the peers before anything runs: Humming's ranges, and what is compiled ahead."""

import re
from pathlib import Path

import pytest
import warm_peers
from layer_problems import FULL_SWEEP
from peers_humming import ranges_of
from warm_peers import jobs_of, warm_all


def test_the_range_of_one_row_is_always_kept() -> None:
    """The launcher looks one row up whatever the call; these are Humming's bounds at kimi-k2.5-tp8, w2."""
    entries = [[0, 4, {}], [4, 40, {}], [40, 96, {}], [96, 1 << 30, {}]]
    assert ranges_of(entries, [8, 16]) == [entries[0], entries[1]]
    assert ranges_of(entries, [65536]) == [entries[0], entries[3]]
    assert ranges_of(entries, [1]) == [entries[0]]
    assert ranges_of(entries, [4, 5, 41]) == entries[:3], "a bound belongs to the range below it"


def test_each_weight_type_of_vllm_and_each_case_of_humming_is_compiled_once() -> None:
    jobs = jobs_of(["vllm", "humming"], FULL_SWEEP)
    assert [job for job in jobs if job[0] == "vllm"] == [
        ("vllm", "kimi-k2.5-tp8", "int4", "1"),
        ("vllm", "kimi-k2.5-tp8", "int8", "1"),
        ("vllm", "kimi-k2.5-tp8", "int4-asym", "1"),
    ]
    humming = [job[1:3] for job in jobs if job[0] == "humming"]
    assert len(set(humming)) == len(humming) == 5 + 2 * 2
    assert not any(form == "int4-act-order" for _, form in humming)
    assert jobs_of([], FULL_SWEEP) == []


def test_compiling_ahead_ends_with_the_time_and_says_what_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "warm.py"
    script.write_text(
        "import sys, time\n"
        "if sys.argv[1] == 'vllm' and sys.argv[3] == 'int8': sys.exit('Traceback\\nno such kernel')\n"
        "time.sleep(60 if sys.argv[1] == 'humming' else 0)\n"
    )
    monkeypatch.setattr(warm_peers, "__file__", str(script))
    cases = [
        case for case in FULL_SWEEP if case.shape.name == "kimi-k2.5-tp8" and case.form.name != "int4-asym"
    ]
    lines = list(warm_all(["vllm", "humming"], cases, limit_s=3.0))
    assert [re.sub(r": \d+ s", "", line) for line in lines] == [
        "vllm kimi-k2.5-tp8 int4",
        "vllm kimi-k2.5-tp8 int8, failed: no such kernel",
        "humming kimi-k2.5-tp8 int4, not done",
        "humming kimi-k2.5-tp8 int8, not done",
    ]
