"""A whole layer's kernel run on a CPU by the emulator: `EmulatedKernel` of a variant.

The kernel's own source is compiled by a C++ compiler. In place of the headers that hold PTX (loads, mma,
barriers, copies) come those of tests/support/emulator, which do the same on memory.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

from marlin_moe import MarlinMoELayer
from marlin_moe.kernels.backends.cuda_arguments import (
    KINDS,
    PARAMETERS,
    SCRATCH,
    SLOTS_FP32,
    activation_numbers,
    flags_of,
    matrix_addresses,
)
from marlin_moe.kernels.backends.cuda_moe import build_spec
from marlin_moe.kernels.plan import cuda_moe as planner
from marlin_moe.kernels.plan.problem import LayerFacts
from marlin_moe.kernels.plan.variant import KernelVariant
from moe_cases import MoECall

COMPILER = shutil.which("g++") or shutil.which("c++")
EMULATOR = Path(__file__).parent / "emulator"
ARCH = "sm_90a"
POISON = 0xFF  # a NaN in every type
GUARD_BYTES = 4096
OUTCOMES = ("right", "a block stands still", "a block wrote behind its shared memory")


@dataclass(frozen=True, slots=True)
class EmulatedKernel:
    """A variant's kernel as a function of a shared library."""

    variant: KernelVariant
    library: ctypes.CDLL

    @classmethod
    def compile(
        cls, variant: KernelVariant, folder: Path, *, edit: tuple[str, str, str] | None = None
    ) -> EmulatedKernel:
        """Compile a variant in a folder of its own; `edit` is (file, old, new), text to change before."""
        spec = build_spec(variant, ARCH)
        place = Path(tempfile.mkdtemp(dir=folder))
        for source in spec.source.root.glob("*.cu*"):
            text = source.read_text()
            shared = "extern __shared__ uint4 dynamic[];"
            (place / source.name).write_text(text.replace(shared, "uint4* dynamic = dynamic_shared();"))
        for header in EMULATOR.iterdir():
            shutil.copy(header, place / header.name)
        if edit is not None:
            file, old, new = edit
            text = (place / file).read_text()
            assert text.count(old) == 1, f"{file}: expected once: {old}"
            (place / file).write_text(text.replace(old, new))
        main = place / "main.cpp"
        main.write_text(
            f'#include "runtime.h"\n{spec.prologue}\n#include "{spec.source.name}"\n'
            'extern "C" int run(int grid, int threads, long shared, unsigned seed, const MoEArgs* args,\n'
            "                   int flags) {\n"
            "  auto entry = [&] { " + variant.kernel + "(*args, flags); };\n"
            "  return emulator::run_grid(grid, threads, shared, seed, entry);\n}\n"
        )
        target = place / "kernel.so"
        options = ("-std=c++20", "-O1", "-fno-strict-aliasing", "-shared", "-fPIC", "-pthread", "-w")
        command = [str(COMPILER), *options, f"-I{place}", str(main), "-o", str(target)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{variant.label}: {done.stderr[:4000]}")
        library = ctypes.CDLL(str(target))
        library.run.restype = ctypes.c_int
        return cls(variant, library)

    def run(self, layer: MarlinMoELayer, call: MoECall, *, blocks: int = 3, seed: int = 0) -> torch.Tensor:
        """The layer's output for a call that fits one pass, with poisoned scratch between guards."""
        facts, options = LayerFacts.of(layer), call.options
        tokens, top_k = call.ids.shape
        rows = tokens * top_k
        plan = planner.plan_workspace(facts, rows=rows, blocks=planner.BLOCKS_PER_SM * blocks, arch=ARCH)
        scratch = torch.full((plan.nbytes + 2 * GUARD_BYTES,), POISON, dtype=torch.uint8)
        offsets = {buffer.name: buffer.offset_bytes for buffer in plan.buffers}
        out = torch.full((tokens + 2, layer.hidden_size), float("nan"), dtype=call.x.dtype)
        expert_map = layer.expert_map
        activation = layer.activation if options.get("activation") is None else options["activation"]
        x = call.x.contiguous()
        flags = flags_of(
            call.ids,
            call.weights,
            weight_on_input=options.get("apply_router_weight_on_input", False),
            slots_fp32=rows <= planner.FP32_ROWS,
        )
        parts = planner.FP32_ROWS // rows if flags & SLOTS_FP32 else 1
        if self.variant.kernel == "decode":
            parts = planner.most_slot_parts(facts, rows=rows, arch=ARCH)
        packed = PARAMETERS.pack(
            x.data_ptr(),
            call.weights.contiguous().data_ptr(),
            call.ids.contiguous().data_ptr(),
            0 if expert_map is None else expert_map.data_ptr(),
            *matrix_addresses(layer.w13),
            *matrix_addresses(layer.w2),
            out[1:].data_ptr(),
            *(scratch.data_ptr() + GUARD_BYTES + offsets[name] for name in SCRATCH),
            x.stride(0),
            out.stride(0),
            tokens,
            top_k,
            facts.num_experts,
            facts.num_global_experts,
            facts.hidden_size,
            facts.padded_intermediate_size,
            KINDS.index(activation.kind),
            planner.split_capacity(planner.BLOCKS_PER_SM * blocks),
            planner.most_slot_parts(facts, rows=rows, arch=ARCH)
            if self.variant.kernel == "decode"
            else parts,
            options.get("routed_scaling_factor", 1.0),
            *activation_numbers(activation),
            flags,
        )
        smem = self.variant.smem_bytes(num_experts=facts.num_experts, slots=rows)
        code = self.library.run(
            blocks,
            self.variant.threads,
            ctypes.c_long(smem),
            seed,
            ctypes.create_string_buffer(packed),
            flags,
        )
        assert code == 0, f"{self.variant.label}: {OUTCOMES[code]}"
        guards = (scratch[:GUARD_BYTES], scratch[-GUARD_BYTES:])
        assert all(bool((guard == POISON).all()) for guard in guards), "written beyond the scratch"
        assert bool(out[0].isnan().all() & out[-1].isnan().all()), "written beyond the result"
        return out[1:-1].clone()
