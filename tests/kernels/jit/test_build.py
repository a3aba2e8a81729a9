"""Cache before compiler, one compile per spec, and none where it is forbidden."""

import errno
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from marlin_moe.kernels.errors import JitError, MarlinMoEWarning
from marlin_moe.kernels.jit import build as build_module
from marlin_moe.kernels.jit import cache as cache_module
from marlin_moe.kernels.jit.build import compile_all, obtain_cubin
from marlin_moe.kernels.jit.compile import CompiledKernel, compile_cubin
from marlin_moe.kernels.jit.source import CUDA_FOLDER, KernelSource
from marlin_moe.kernels.jit.spec import BuildSpec
from tiny_kernel import tiny_spec, write_tiny
from tree import ROOT, run_python


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MARLIN_MOE_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("MARLIN_MOE_JIT", raising=False)
    return tmp_path / "cache"


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[BuildSpec]:
    """The specs that reached the compiler."""
    seen: list[BuildSpec] = []

    def count(spec: BuildSpec) -> CompiledKernel:
        seen.append(spec)
        return compile_cubin(spec)

    monkeypatch.setattr(build_module, "compile_cubin", count)
    return seen


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return write_tiny(tmp_path / "sources")


def test_a_hit_does_not_compile(root: Path, compiled: list[BuildSpec]) -> None:
    first = obtain_cubin(tiny_spec(root))
    assert obtain_cubin(tiny_spec(root)) == first
    assert len(compiled) == 1
    (root / "top.cuh").write_text("#pragma once\nconstexpr float TOP = 5.0f;\n")
    assert obtain_cubin(tiny_spec(root)).cubin != first.cubin
    assert len(compiled) == 2


def cut(entry: bytes) -> bytes:
    return entry[:-100]


def flip(entry: bytes) -> bytes:
    return entry[:-50] + bytes([entry[-50] ^ 4]) + entry[-49:]


@pytest.mark.parametrize("damage", [cut, flip])
def test_a_damaged_entry_is_compiled_again(
    root: Path, cache: Path, compiled: list[BuildSpec], damage: Callable[[bytes], bytes]
) -> None:
    first = obtain_cubin(tiny_spec(root))
    (path,) = (cache / "cubin" / "v1").iterdir()
    path.write_bytes(damage(path.read_bytes()))
    assert obtain_cubin(tiny_spec(root)).cubin == first.cubin
    assert len(compiled) == 2
    obtain_cubin(tiny_spec(root))
    assert len(compiled) == 2, "the entry was replaced"


def test_forbid_runs_what_is_there_and_says_what_to_build(
    root: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, compiled: list[BuildSpec]
) -> None:
    spec = tiny_spec(root, arch="sm_90a", label="tiny, factor 3")
    monkeypatch.setenv("MARLIN_MOE_JIT", "forbid")
    message = r"tiny, factor 3: .*sm_90a.*forbid.*marlin-moe kernels build PATH --arch sm_90a"
    with pytest.raises(JitError, match=message) as caught:
        obtain_cubin(spec)
    text = str(caught.value)
    assert f"in {cache}/cubin/v1 under {spec.key()}" in text
    assert all(flag in text for flag in ("--tp", "--ep", "--dtype", "--max-tokens", "--top-k", "NVRTC 13."))
    assert compiled == []
    (report,) = compile_all([spec])
    assert not report.cached
    assert obtain_cubin(spec).key == report.key
    assert len(compiled) == 1


def test_another_word_than_allow_or_forbid_is_refused(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MARLIN_MOE_JIT", "off")
    with pytest.raises(JitError, match="MARLIN_MOE_JIT: expected allow or forbid, got 'off'"):
        obtain_cubin(tiny_spec(root))
    monkeypatch.setenv("MARLIN_MOE_JIT", "allow")
    assert obtain_cubin(tiny_spec(root)).cubin


def test_compile_all_reports_in_order_and_compiles_equal_specs_once(
    root: Path, compiled: list[BuildSpec]
) -> None:
    spill = KernelSource(name="spill.cu", root=root)
    specs = [
        tiny_spec(root, label="plain"),
        tiny_spec(root, arch="sm_90a"),
        tiny_spec(root, source=spill, kernels=("spill",), max_registers=24),
        tiny_spec(root, label="plain again"),
    ]
    reports = compile_all(specs, jobs=2)
    assert [report.name for report in reports] == ["plain", "tiny.cu:tiny", "spill.cu:spill", "plain again"]
    assert [report.arch for report in reports] == ["sm_80", "sm_90a", "sm_80", "sm_80"]
    assert reports[2].registers == 24
    assert reports[2].spill_store_bytes > 100
    assert reports[0].spill_store_bytes == reports[0].spill_load_bytes == 0
    assert all(report.seconds > 0 and report.cubin_bytes > 1000 for report in reports)
    assert len(compiled) == 3
    assert [report.cached for report in compile_all(specs)] == [True] * 4
    assert len(compiled) == 3


def test_compile_all_without_a_cache_writes_nothing(
    root: Path, cache: Path, compiled: list[BuildSpec]
) -> None:
    for _ in range(2):
        compile_all([tiny_spec(root)], cache=False)
    assert len(compiled) == 2
    assert not cache.exists()


def test_compile_all_lists_every_failure_and_keeps_the_rest(root: Path, compiled: list[BuildSpec]) -> None:
    good = tiny_spec(root)
    bad = [tiny_spec(root, constants={}, label=f"bad {arch}", arch=arch) for arch in ("sm_80", "sm_90a")]
    with pytest.raises(JitError, match=r"(?s)2 of 3 kernels did not compile:.*bad sm_80.*bad sm_90a"):
        compile_all([bad[0], good, bad[1]])
    assert compile_all([good])[0].cached


def relative(cache: Path) -> str:
    return "cache"


def of_nobody(cache: Path) -> str:
    return "~nosuchuser/cache"


def writable_by_all(cache: Path) -> str:
    cache.mkdir()
    cache.chmod(0o777)
    return str(cache)


@pytest.mark.parametrize("place", [relative, of_nobody, writable_by_all])
@pytest.mark.parametrize("must_store", [False, True])
def test_a_cache_that_is_refused_is_one_error_before_anything_is_compiled(
    root: Path,
    cache: Path,
    compiled: list[BuildSpec],
    monkeypatch: pytest.MonkeyPatch,
    place: Callable[[Path], str],
    must_store: bool,
) -> None:
    monkeypatch.setenv("MARLIN_MOE_CACHE", place(cache))
    specs = [tiny_spec(root, constants={"FACTOR": factor}) for factor in range(3)]
    with pytest.raises(JitError, match="MARLIN_MOE_CACHE") as caught:
        compile_all(specs, must_store=must_store)
    assert "did not compile" not in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1
    assert compiled == []


def test_what_is_wrong_for_every_kernel_is_said_once(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(spec: BuildSpec) -> CompiledKernel:
        raise JitError("NVRTC: expected success, got another answer.")

    monkeypatch.setattr(build_module, "compile_cubin", fail)
    with pytest.raises(JitError, match="2 of 2 kernels did not compile") as caught:
        compile_all([tiny_spec(root), tiny_spec(root, arch="sm_90a")])
    assert str(caught.value).count("NVRTC: expected success") == 1


def test_where_cubins_must_be_stored_a_cache_that_cannot_be_made_is_an_error(
    root: Path, cache: Path, compiled: list[BuildSpec]
) -> None:
    cache.write_text("a file")
    with pytest.raises(JitError, match=rf"{cache}: expected a folder to store.*Nothing was stored"):
        compile_all([tiny_spec(root)], must_store=True)
    assert compiled == []


def test_where_cubins_must_be_stored_a_failed_write_is_an_error(
    root: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    compile_all([tiny_spec(root)], must_store=True)
    monkeypatch.setattr(os, "fsync", full)
    others = [tiny_spec(root, arch="sm_90a"), tiny_spec(root, arch="sm_89")]
    for specs, stored in ((others, "nothing"), ([tiny_spec(root), *others], "1")):
        monkeypatch.setattr(cache_module, "_unusable", set())
        with (
            pytest.warns(MarlinMoEWarning, match="No space left"),
            pytest.raises(JitError, match=rf"{cache}/cubin/v1: .*got {stored} stored: .*No space left"),
        ):
            compile_all(specs, must_store=True)


def test_threads_that_want_the_same_compile_it_once(root: Path, compiled: list[BuildSpec]) -> None:
    together = threading.Barrier(4)

    def build(_: int) -> bytes:
        together.wait()
        return obtain_cubin(tiny_spec(root)).cubin

    with ThreadPoolExecutor(4) as pool:
        cubins = set(pool.map(build, range(4)))
    assert len(cubins) == len(compiled) == 1


FIRST_USE = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from marlin_moe.kernels.jit.build import compile_all
from tiny_kernel import tiny_spec
specs = [tiny_spec(Path(sys.argv[2]), constants={"FACTOR": factor}) for factor in range(4)]
print(len(compile_all(specs, cache=False, jobs=4)))
"""


@pytest.mark.parametrize("attempt", range(3))
def test_the_first_use_in_a_process_may_be_by_several_threads(root: Path, attempt: int) -> None:
    result = run_python("-c", FIRST_USE, str(ROOT / "tests" / "support"), str(root))
    assert (result.returncode, result.stdout.strip()) == (0, "4"), result.stderr


PROCESS = """
import hashlib, sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from marlin_moe.kernels.jit import build, cache
from tiny_kernel import tiny_spec
root, meeting, me = Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4]
read = build.read_entry

def miss_then_meet(key):  # both have looked before either compiles
    found = read(key)
    (meeting / me).touch()
    deadline = time.monotonic() + 60
    while len(list(meeting.iterdir())) < 2 and time.monotonic() < deadline:
        time.sleep(0.005)
    return found

build.read_entry = miss_then_meet
compiled = build.compile_all([tiny_spec(root)])[0]
build.read_entry = read
print(compiled.cached, hashlib.sha256(build.obtain_cubin(tiny_spec(root)).cubin).hexdigest())
"""


def test_two_processes_that_compile_the_same_at_once(root: Path, cache: Path, tmp_path: Path) -> None:
    (tmp_path / "meeting").mkdir()
    command = [sys.executable, "-c", PROCESS, str(ROOT / "tests" / "support"), str(root)]
    processes = [
        subprocess.Popen(
            [*command, str(tmp_path / "meeting"), name],
            env=os.environ | {"PYTHONSAFEPATH": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for name in ("one", "two")
    ]
    answers = [process.communicate(timeout=120) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], answers
    outputs = [out.split() for out, _ in answers]
    assert [cached for cached, _ in outputs] == ["False", "False"], "they did not compile at the same time"
    assert outputs[0] == outputs[1]
    assert len(list((cache / "cubin" / "v1").iterdir())) == 1


COMPILE_TINY = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import torch
from marlin_moe.kernels.jit.build import compile_all
from tiny_kernel import tiny_spec
torch.zeros(1, device="cuda")
(report,) = compile_all([tiny_spec(Path(sys.argv[2]))])
print(report.cached, report.registers > 0)
"""


@pytest.mark.gpu
def test_processes_with_caches_of_their_own_both_compile(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where there is a driver NVRTC can keep what it compiled, and a hit there writes no log."""
    monkeypatch.setenv("CUDA_CACHE_PATH", str(tmp_path / "driver"))
    for name in ("one", "two"):
        monkeypatch.setenv("MARLIN_MOE_CACHE", str(tmp_path / name))
        result = run_python("-c", COMPILE_TINY, str(ROOT / "tests" / "support"), str(root))
        assert (result.returncode, result.stdout.split()) == (0, ["False", "True"]), result.stderr
        assert len(list((tmp_path / name / "cubin" / "v1").iterdir())) == 1


def test_nothing_is_written_beside_the_sources_or_into_the_package(root: Path) -> None:
    def listing() -> set[Path]:
        package = Path(build_module.__file__).parent
        folders = (root, package, CUDA_FOLDER)
        return {path for folder in folders for path in folder.rglob("*") if "__pycache__" not in path.parts}

    before = listing()
    compile_all([tiny_spec(root), tiny_spec(root, arch="sm_90a", line_info=True)])
    assert listing() == before
