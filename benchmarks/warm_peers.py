"""Compiles what the peers compile on first use, all at once in processes of their own.

vLLM's published Marlin MoE kernels have no code for Hopper but PTX: when the first of a weight type is
launched, the driver compiles all 60 of it, on one thread, for more than half a minute. Humming compiles a few
kernels for each shape, several at once: they yield to the driver's threads, which take longest.
$CUDA_CACHE_PATH and $HUMMING_CACHE_DIR keep what was made.
"""

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import click
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))

from layer_bench import MAKERS
from layer_problems import FORMATS, SHAPES, Case
from layer_tensors import random_layer, random_routing

PEERS = ("vllm", "humming")
COURTEOUS = 10  # of Humming's compilers, in the scheduler's terms


def warm_all(peers: Sequence[str], cases: Sequence[Case], *, limit_s: float | None = None) -> Iterator[str]:
    """A line for each process: what it compiled for, when it ended, and its last words if it failed.

    Those that are not done after `limit_s` are ended, and said to be.
    """
    start = time.perf_counter()
    running = {
        job: subprocess.Popen(
            [sys.executable, __file__, *job],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for job in jobs_of(peers, cases)
    }
    for job, process in running.items():
        left = None if limit_s is None else max(0.0, limit_s - (time.perf_counter() - start))
        try:
            said, _ = process.communicate(timeout=left)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            outcome = ", not done"
        else:
            words = said.strip().splitlines()
            ended = words[-1] if words else str(process.returncode)
            outcome = "" if process.returncode == 0 else f", failed: {ended}"
        yield f"{' '.join(job[:3])}: {time.perf_counter() - start:.0f} s{outcome}"


def jobs_of(peers: Sequence[str], cases: Sequence[Case]) -> list[tuple[str, str, str, str]]:
    """(peer, shape, format, tokens) of every process. vLLM's kernels know no shape: one for each format."""
    jobs: dict[tuple[str, ...], tuple[str, str, str, str]] = {}
    for peer in peers:
        for case in cases:
            if case.form.act_order:  # neither has it
                continue
            key = (peer, case.form.name) if peer == "vllm" else (peer, case.form.name, case.shape.name)
            tokens = case.tokens[:1] if peer == "vllm" else case.tokens
            jobs.setdefault(key, (peer, case.shape.name, case.form.name, ",".join(map(str, tokens))))
    return list(jobs.values())


@click.command(help=__doc__.partition("\n")[0])
@click.argument("peer", type=click.Choice(PEERS))
@click.argument("shape", type=click.Choice(list(SHAPES)))
@click.argument("form", type=click.Choice(list(FORMATS)))
@click.argument("tokens")
@torch.no_grad()
def main(peer: str, shape: str, form: str, tokens: str) -> None:
    """One process: a layer, called once with each number of tokens."""
    if peer == "humming":
        os.nice(COURTEOUS)
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
