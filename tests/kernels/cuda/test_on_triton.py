"""The bodies of this folder on the Triton backend, each file in a process of its own (`places`)."""

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from marlin_moe import fused_marlin_moe
from moe_cases import DenseMoE, MoECase, check, make_call, make_layer
from places import BACKEND, on_triton

HERE = Path(__file__).parent
QUARTERS_OF_FORMATS = ("w4 and not w4z", "w4z", "w8 and not w8z", "w8z")
QUARTERS_OF_PAIRS = ("0] or 1] or 2]", "3] or 4]", "5] or 6]", "7] or 8] or 9]")
"""By the last digit. Every case compiles kernels of its own for some seconds, one after another."""
OVERFLOW = "ignore:overflow encountered in exp:RuntimeWarning"  # NumPy's; exp(-x) of a sigmoid that is 0

pytestmark = pytest.mark.skipif(
    on_triton() or "TRITON_INTERPRET" in os.environ, reason="this process is one of those"
)


def run_file(name: str, *options: str, timeout_s: int, **environment: str) -> None:
    """Fail unless pytest finds tests in a file of this folder and all that run pass."""
    command = [sys.executable, "-m", "pytest", "-q", "-W", OVERFLOW, "-p", "no:cacheprovider", *options]
    ours = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    result = subprocess.run(
        [*command, str(HERE / name)],
        env=ours | environment,  # not what an xdist worker says of itself
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-8000:]
    assert " passed" in result.stdout, result.stdout


INTERPRETED = {
    "formats": ("test_op.py", "-k", "every_format"),
    "pairs": ("test_op.py", "-k", "not every_format"),
    "reproducible": ("test_reproducible.py", "-k", "decode or all"),
    "wrong arguments": ("test_wrong_arguments.py",),
    "export": ("test_compile_mode.py", "-k", "test_export"),
}


@pytest.fixture(scope="module")
def interpreted() -> Iterator[dict[str, Future[None]]]:
    """All of them on all cores, since each takes one."""
    pytest.importorskip("triton", minversion="3.7", reason="the interpreter of triton 3.6 needs numpy < 2.4")
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        yield {
            name: pool.submit(run_file, *command, timeout_s=900, TRITON_INTERPRET="1")
            for name, command in INTERPRETED.items()
        }


@pytest.mark.parametrize("name", INTERPRETED)
def test_in_the_interpreter(interpreted: dict[str, Future[None]], name: str) -> None:
    """float32 and float16; not bfloat16, which the interpreters of triton 3.6 and 3.7.1 compute wrongly."""
    interpreted[name].result()


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("file", "options"),
    [
        *(("test_op.py", ("-k", f"every_format and {part}")) for part in QUARTERS_OF_FORMATS),
        *(("test_op.py", ("-k", f"pairwise and ({part})")) for part in QUARTERS_OF_PAIRS),
        ("test_op.py", ("-k", "not every_format and not pairwise")),
        ("test_reproducible.py", ()),
        ("test_wrong_arguments.py", ()),
        ("test_graphs.py", ("-k", "not share_its_scratch")),  # it asks for the CUDA backend's
        ("test_streams.py", ()),
        ("test_workspace_gpu.py", ("-k", "not repeated_calls and not after_reserve and not compiles_its")),
        ("test_compile_mode.py", ()),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value[1:]).replace(" ", "_"),
)
def test_on_a_gpu(file: str, options: tuple[str, ...]) -> None:
    """What is left out is about calls made ready and kernels compiled ahead, which this backend has not."""
    run_file(file, "-m", "gpu", *options, timeout_s=1800, **{BACKEND: "triton"})


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 300])
def test_by_hand_beside_the_cuda_backend(tokens: int) -> None:
    case = MoECase(tokens=tokens, num_experts=8, hidden_size=256, padded_intermediate_size=128)
    made = make_layer(case, "cuda")
    call = make_call(case, made.layer)
    want = DenseMoE(made)(call)
    by_hand = call.run(made.layer, backend="triton")
    check(case, call, by_hand, want)
    check(case, call, call.run(made.layer), want)
    assert torch.equal(call.run(made.layer, backend="triton"), by_hand)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = fused_marlin_moe(call.x, made.layer, call.weights, call.ids, backend="triton")
    out.fill_(torch.nan)
    graph.replay()
    assert torch.equal(out, by_hand)
