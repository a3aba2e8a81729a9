"""A few small calls of the CUDA backend, checked on the CPU: what compute-sanitizer runs.

    compute-sanitizer --tool memcheck --error-exitcode 9 python tests/kernels/cuda/small.py
    compute-sanitizer --tool racecheck --error-exitcode 9 python tests/kernels/cuda/small.py

Everything but the op itself happens on the CPU, so that next to nothing else is watched.
"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "support"))

from moe_cases import DenseMoE, MoECall, MoECase, check, make_call, make_layer

SMALL = {"num_experts": 3, "hidden_size": 128, "padded_intermediate_size": 64, "top_k": 2}
CASES = (
    MoECase(**SMALL, tokens=1),
    MoECase(**SMALL, tokens=33, routing="holes", max_tokens=20, expert_map="ranks", ids_dtype=torch.int32),
    MoECase(**SMALL, tokens=120, dtype=torch.float16, bits=8, symmetric=False, group_size=None, view="odd"),
    MoECase(**SMALL, tokens=17, act_order=True, biased=True, activation="relu2", padding=32, view="gaps"),
    MoECase(**SMALL, tokens=60, act_order=True, w2_bits=8, routing="holes"),
    MoECase(num_experts=3, hidden_size=192, padded_intermediate_size=192, tokens=9, w2_bits=8, routing="one"),
    MoECase(**(SMALL | {"top_k": 1}), tokens=190, routing="holes", max_tokens=150, symmetric=False),
)


def main() -> None:
    """Run every case, with a result of its own and into a given one that ends where its memory ends."""
    for case in CASES:
        made = make_layer(case)
        call, on_gpu = make_call(case, made.layer), made.layer.to("cuda")
        moved = MoECall(
            x=call.x.cuda(), weights=call.weights.cuda(), ids=call.ids.cuda(), options=call.options
        )
        want = DenseMoE(made)(call)
        for out in (None, torch.empty(call.x.shape, dtype=call.x.dtype, device="cuda")):
            got = moved.run(on_gpu, out=out, backend="cuda").cpu()
            check(case, call, got, want)
        print("right:", case)


if __name__ == "__main__":
    main()
