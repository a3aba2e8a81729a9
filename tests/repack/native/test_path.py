"""The switch MARLIN_MOE_NATIVE, with and without a C extension."""

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from marlin_moe.kernels.errors import MarlinMoEError
from marlin_moe.kernels.layout import pack_qweight
from marlin_moe.repack.native import path
from marlin_moe.repack.native.path import NativePath, load_extension, native_path
from marlin_moe.repack.native.repack_weights import repack_weights, run_c_loop

NAME = "marlin_moe.repack.native._native"
BUILT = not isinstance(load_extension(), str)
needs_extension = pytest.mark.skipif(not BUILT, reason="the C extension was not built")


@pytest.fixture
def missing_extension(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As after an installation without a compiler."""
    monkeypatch.setitem(sys.modules, NAME, None)
    load_extension.cache_clear()
    yield
    monkeypatch.undo()
    load_extension.cache_clear()


def test_built_where_it_is_demanded() -> None:
    """MARLIN_MOE_NATIVE=1, as in continuous integration, must not pass by skipping."""
    assert BUILT or os.environ.get("MARLIN_MOE_NATIVE") != "1"


@needs_extension
@pytest.mark.parametrize("switch", [None, "1"])
def test_the_c_loop_is_taken(switch: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    set_switch(monkeypatch, switch)
    best = path.load_extension().variants()[0]
    assert native_path() == native_path(torch.device("cpu")) == NativePath(variant=best, reason=None)
    assert native_path().used
    assert str(native_path()) == f"C ({best})"


def set_switch(monkeypatch: pytest.MonkeyPatch, switch: str | None) -> None:
    if switch is None:
        monkeypatch.delenv("MARLIN_MOE_NATIVE", raising=False)
    else:
        monkeypatch.setenv("MARLIN_MOE_NATIVE", switch)


def test_zero_takes_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MARLIN_MOE_NATIVE", "0")
    assert native_path() == NativePath(variant=None, reason="MARLIN_MOE_NATIVE=0")
    assert not native_path().used
    assert str(native_path()) == "torch operations (MARLIN_MOE_NATIVE=0)"


@pytest.mark.parametrize("switch", ["", "yes", "2", "01"])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_other_values_are_errors(switch: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MARLIN_MOE_NATIVE", switch)
    with pytest.raises(MarlinMoEError, match=rf"MARLIN_MOE_NATIVE: expected 0 .* got '{switch}'\. Unset it"):
        native_path(device)


@pytest.mark.parametrize("switch", [None, "0", "1"])
def test_other_devices_take_torch(
    switch: str | None, missing_extension: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_switch(monkeypatch, switch)
    found = native_path("meta")
    assert not found.used
    assert "on meta" in str(found.reason)


@pytest.mark.parametrize("device", ["cuda", "cuda:1"])
@pytest.mark.parametrize("reason", ["of the weather", None])
@pytest.mark.parametrize("switch", [None, "0", "1"])
def test_a_cuda_device_takes_the_kernel(
    switch: str | None,
    reason: str | None,
    device: str,
    missing_extension: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever the C extension is; without the kernel it is torch with the reason, or an error."""
    set_switch(monkeypatch, switch)
    monkeypatch.setattr(path, "reason_against_kernels", lambda device: reason)
    monkeypatch.setattr(path, "architecture", lambda device: "sm_90a")
    if switch == "1" and reason is not None:
        with pytest.raises(
            MarlinMoEError, match=r"=1: expected the kernel .*, but of the weather\. pip install"
        ):
            native_path(device)
        return
    expected = f"torch operations ({reason})" if reason else "CUDA kernel (sm_90a)"
    assert str(native_path(device)) == (
        "torch operations (MARLIN_MOE_NATIVE=0)" if switch == "0" else expected
    )


def test_without_a_cuda_device_there_is_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MARLIN_MOE_NATIVE", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert str(native_path("cuda")) == "torch operations (torch finds no CUDA device)"


def test_missing_extension_takes_torch_and_says_so(
    missing_extension: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MARLIN_MOE_NATIVE", raising=False)
    found = native_path()
    assert found.variant is None
    assert str(found).startswith("torch operations (the C extension was not built: ")
    weight_packed = torch.arange(128, dtype=torch.int32).view(1, 64, 2)
    assert torch.equal(repack_weights(weight_packed, bits=4), pack_qweight(weight_packed, bits=4))
    with pytest.raises(ImportError, match="was not built"):
        run_c_loop(weight_packed, torch.empty(1, 1, 128, dtype=torch.int32), bits=4, variant="scalar")


def test_missing_extension_that_is_demanded(missing_extension: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MARLIN_MOE_NATIVE", "1")
    weight_packed = torch.zeros(1, 64, 2, dtype=torch.int32)
    with pytest.raises(
        MarlinMoEError, match=r"MARLIN_MOE_NATIVE=1: .* was not built: .* Install a C compiler"
    ):
        repack_weights(weight_packed, bits=4)


def test_extension_that_does_not_load(missing_extension: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> None:
        raise ImportError("undefined symbol: PyNothing", name=name)

    monkeypatch.delenv("MARLIN_MOE_NATIVE", raising=False)
    monkeypatch.setattr(path.importlib, "import_module", refuse)
    assert native_path().reason == "the C extension does not load: undefined symbol: PyNothing"


@pytest.mark.parametrize(("variant", "reason"), [(None, None), ("avx2", "a reason")])
def test_a_path_is_one_or_the_other(variant: str | None, reason: str | None) -> None:
    with pytest.raises(ValueError, match="a variant or a reason"):
        NativePath(variant=variant, reason=reason)


SCRIPT = f"""
import sys
if sys.argv[1] == "missing":
    sys.modules["{NAME}"] = None
import torch
from marlin_moe.repack.native.path import native_path
from marlin_moe.repack.native.repack_weights import repack_weights
out = repack_weights(torch.arange(128, dtype=torch.int32).view(1, 64, 2), bits=4)
print(out.flatten()[:3].tolist(), native_path().used)
"""


def run_script(state: str, switch: str | None) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "MARLIN_MOE_NATIVE"}
    if switch is not None:
        environment["MARLIN_MOE_NATIVE"] = switch
    command = [sys.executable, "-P", "-c", SCRIPT, state]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_a_new_process_follows_the_switch() -> None:
    same = [run_script("built", "0"), run_script("missing", None)]
    if BUILT:
        same.append(run_script("built", None))
    assert [ran.returncode for ran in same] == [0] * len(same), [ran.stderr for ran in same]
    words = {ran.stdout.rpartition("]")[0] for ran in same}
    assert len(words) == 1
    assert [ran.stdout.split()[-1] for ran in same] == ["False", "False", "True"][: len(same)]
    demanded = run_script("missing", "1")
    assert demanded.returncode == 1
    assert "MarlinMoEError: MARLIN_MOE_NATIVE=1" in demanded.stderr
