// One row per slot (and split of GEMM 2's K) -> one row per token: the slots that reach an expert of this rank,
// added in their order.
#pragma once
#include "number.cuh"

__device__ __forceinline__ float as_float(float v) { return v; }
__device__ __forceinline__ float as_float(__nv_bfloat16 v) { return Bf16::to_float(v); }
__device__ __forceinline__ float as_float(__half v) { return Fp16::to_float(v); }

template <class T, class Slot>
__device__ void reduce(const MoEArgs& args, int splits) {
  int columns8 = args.hidden_size / 8;
  u64 items = static_cast<u64>(args.tokens) * columns8;
  const Slot* slots = static_cast<const Slot*>(args.w2_output);
  for (u64 item = static_cast<u64>(blockIdx.x) * blockDim.x + threadIdx.x; item < items;
       item += static_cast<u64>(gridDim.x) * blockDim.x) {
    int token = item / columns8, column = item % columns8 * 8;
    float total[8] = {};
    for (int k = 0; k < args.top_k; k++) {
      u64 slot = static_cast<u64>(token) * args.top_k + k;
      if (!args.slot_is_here[slot]) continue;
      constexpr int VECTORS = sizeof(Slot) / 2;  // of 16 bytes
      for (int split = 0; split < splits; split++) {
        uint4 vectors[VECTORS];
        u64 row = static_cast<u64>(split) * args.tokens * args.top_k + slot;
        const uint4* from = reinterpret_cast<const uint4*>(slots + row * args.hidden_size + column);
#pragma unroll
        for (int v = 0; v < VECTORS; v++) vectors[v] = from[v];
        const Slot* part = reinterpret_cast<const Slot*>(vectors);
#pragma unroll
        for (int i = 0; i < 8; i++) total[i] += as_float(part[i]);
      }
    }
    typename T::Scalar* out = static_cast<typename T::Scalar*>(args.out) + token * args.out_stride + column;
#pragma unroll
    for (int i = 0; i < 8; i++) out[i] = T::from_float(total[i] * args.routed_scaling_factor);
  }
}
