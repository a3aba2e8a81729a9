"""Peak private memory of loading a layer: the finished layer and one block of its experts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from checkpoint_spec import CheckpointSpec
from checkpoints import make_source, write_source
from repeated import write_repeated

MIB = 1 << 20
SCRIPT = """
import ctypes, gc, json, sys
from marlin_moe import load_layers
import marlin_moe.repack.blocks as blocks
import marlin_moe.repack.process as process

def status(key):
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(key + ":"))

block_bytes = int(sys.argv[1])
run = blocks.run_blocks
process.run_blocks = lambda *args: run(*args, block_bytes=block_bytes)
for path in sys.argv[2:]:
    gc.collect()
    if hasattr(ctypes.CDLL(None), "malloc_trim"):
        ctypes.CDLL(None).malloc_trim(0)  # what was freed before may not serve this layer unseen
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # VmHWM starts anew
    before = status("RssAnon")
    layers = load_layers(path)
    nbytes = sum(tensor.nbytes for layer in layers.values() for _, tensor in layer.tensors())
    peak = status("VmHWM") - status("RssFile") - before
    print(json.dumps({"layer": nbytes, "peak": peak, "after": status("RssAnon") - before}))
    del layers
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="memory is measured by /proc of Linux")
def test_peak_of_a_layer(tmp_path: Path) -> None:
    """Blocks of 8 MiB of layers of 120 MiB, with and without an order: far below two layers.

    A small checkpoint goes first: libraries that load late are no part of a layer. Besides its source a
    block's stages hold a sorted, sliced or padded copy (sorting takes 4 bits apart into bytes), and malloc
    keeps pieces that were freed, more or fewer from run to run: measured 1 block without an order, 3 to 6
    with one or with torch operations in place of the C loop. Ten are allowed; a second layer would be 15.
    """
    small = CheckpointSpec(num_experts=1, hidden_size=64, intermediate_size=64, actorder="group", top_k=1)
    write_source(tmp_path / "small", make_source(small))
    experts, per_expert = 72, 0
    for name, actorder in (("plain", None), ("ordered", "group")):
        spec = replace(small, hidden_size=1024, intermediate_size=1024, actorder=actorder, extras=())
        per_expert = write_repeated(tmp_path / name, spec, num_experts=experts)
    block_bytes = 8 * MIB
    folders = [str(tmp_path / name) for name in ("small", "plain", "ordered")]
    command = [sys.executable, "-c", SCRIPT, str(block_bytes), *folders]
    environment = os.environ | {"PYTHONSAFEPATH": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=300)
    for name, line in zip(("plain", "ordered"), done.stdout.splitlines()[1:], strict=True):
        found = json.loads(line)
        told = f"{name}: " + ", ".join(f"{key} {value / MIB:.0f} MiB" for key, value in found.items())
        print(told)
        assert found["layer"] == pytest.approx(experts * per_expert, rel=0.05), told
        assert found["layer"] > 14 * block_bytes, told
        assert found["after"] >= found["layer"] * 0.9, f"the measurement does not see the layer: {told}"
        assert found["peak"] - found["layer"] < 10 * block_bytes, told
