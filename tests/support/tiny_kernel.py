"""A small real kernel in a folder of its own, and the specs that build it."""

from pathlib import Path
from typing import Any

from marlin_moe.kernels.jit.source import KernelSource
from marlin_moe.kernels.jit.spec import BuildSpec

SOURCE = """\
#include <cuda_fp16.h>

#include "inner/scale.cuh"

struct Arguments { const float* x; float* y; long long n; };

extern "C" __global__ void tiny(const __grid_constant__ Arguments args, int offset) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < args.n) args.y[i] = scale(args.x[i]) + FACTOR * offset;
}

template <int N> __global__ void fill(float* y) { y[threadIdx.x] = N; }
"""
HEADERS = {
    "inner/scale.cuh": '#pragma once\n#include "deep.cuh"\n#include "top.cuh"\n'
    "__device__ inline float scale(float x) { return TOP * deep(x); }\n",
    "inner/deep.cuh": "#pragma once\n__device__ inline float deep(float x) { return x + 1.0f; }\n",
    "top.cuh": "#pragma once\nconstexpr float TOP = 2.0f;\n",
    "unused.cuh": "constexpr int UNUSED = 1;\n",
}
SPILLING = """\
extern "C" __global__ void spill(float* p) {
  float a[64];
#pragma unroll
  for (int i = 0; i < 64; i++) a[i] = p[i * 32 + threadIdx.x];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 64; i++) p[i * 32 + threadIdx.x] = a[i * 7 % 64] * a[63 - i];
}
"""
WGMMA = """\
__device__ __forceinline__ void mma(float* d, unsigned long long a, unsigned long long b) {
  asm volatile(
      "{.reg .pred p; setp.ne.b32 p, 1, 0; wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 "
      "{%0,%1,%2,%3}, %4, %5, p, 1, 1, 0, 0;}"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "l"(a), "l"(b));
}

extern "C" __global__ void serial(float* out, unsigned long long a, unsigned long long b, int n) {
  float d[4] = {0, 0, 0, 0};
  asm volatile("wgmma.fence.sync.aligned;");
  for (int i = 0; i < n; i++) { mma(d, a + i, b); d[0] *= 2.0f; }
  asm volatile("wgmma.commit_group.sync.aligned;");
  asm volatile("wgmma.wait_group.sync.aligned 0;");
  for (int i = 0; i < 4; i++) out[threadIdx.x * 4 + i] = d[i];
}
"""


def write_tiny(root: Path) -> Path:
    """Writes the kernels and their headers below `root`; returns it."""
    files = {"tiny.cu": SOURCE, "spill.cu": SPILLING, "serial.cu": WGMMA, **HEADERS}
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def tiny_spec(root: Path, **changes: Any) -> BuildSpec:
    """The tiny kernel with FACTOR = 3 for sm_80, with these fields changed."""
    fields: dict[str, Any] = {
        "source": KernelSource(name="tiny.cu", root=root),
        "kernels": ("tiny",),
        "arch": "sm_80",
        "constants": {"FACTOR": 3},
    }
    return BuildSpec(**fields | changes)
