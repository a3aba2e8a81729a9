"""Compiles what the peers compile on first use, all at once in processes of their own.

vLLM's published Marlin MoE kernels have no code for Hopper but PTX: when the first of a weight type is
launched, the driver compiles all 60 of it, on one thread, for more than half a minute. Humming compiles a few
kernels for each shape. $CUDA_CACHE_PATH and $HUMMING_CACHE_DIR keep what was made.
"""

import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import click
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))

from layer_bench import MAKERS
from layer_problems import FORMATS, SHAPES
from layer_tensors import random_layer, random_routing

PEERS = ("vllm", "humming")


def warm_all(
    peers: Sequence[str], shapes: Sequence[str], formats: Sequence[str], tokens: Sequence[int]
) -> list[str]:
    """A line for each process: what it compiled for, how long that took, and its last words if it failed."""
    numbers = ",".join(map(str, tokens))
    jobs = [
        (peer, shape, form)
        for peer in peers
        for form in formats
        if not FORMATS[form].act_order  # neither has it
        for shape in (shapes if peer == "humming" else shapes[:1])  # vLLM's kernels know no shape
    ]
    start = time.perf_counter()
    running = {
        job: subprocess.Popen(
            [sys.executable, __file__, *job, numbers],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for job in jobs
    }
    lines = []
    for job, process in running.items():
        said, _ = process.communicate()
        words = said.strip().splitlines()
        outcome = "" if process.returncode == 0 else f", failed: {words[-1] if words else process.returncode}"
        lines.append(f"{' '.join(job)}: {time.perf_counter() - start:.0f} s{outcome}")
    return lines


@click.command(help=__doc__.partition("\n")[0])
@click.argument("peer", type=click.Choice(PEERS))
@click.argument("shape", type=click.Choice(list(SHAPES)))
@click.argument("form", type=click.Choice(list(FORMATS)))
@click.argument("tokens")
def main(peer: str, shape: str, form: str, tokens: str) -> None:
    """One process: a layer, called once with each number of tokens."""
    torch.set_grad_enabled(False)
    counts = [int(part) for part in tokens.split(",")]
    problem = SHAPES[shape]
    layer = random_layer(problem, FORMATS[form])
    implementation = MAKERS[peer]([layer], [count * problem.top_k for count in counts])
    for count in counts:
        x = torch.randn(count, problem.hidden_size, device="cuda").bfloat16()
        implementation(0, x, random_routing(problem, tokens=count))
    torch.cuda.synchronize()


if __name__ == "__main__":
    main()
