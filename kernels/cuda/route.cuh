// Slots (token, k) -> rows sorted by expert, and the token tiles of both GEMMs. One block does it.
//
//   ids      slot 0: e2   slot 1: e0   slot 2: e2   slot 3: -1        TOKEN_TILE = 2
//   rows     0: slot 1 (e0)   1: slot 0 (e2)   2: slot 2 (e2)
//   tiles    (e0, row 0, 1 row)   (e2, row 1, 2 rows)
//
// Rows of one expert stand in any order: every row is computed alone and lands by its slot, so the result's bits
// do not depend on it.
#pragma once
#include "args.cuh"

enum Flags { IDS64 = 1, WEIGHTS_FP32 = 2, WEIGHT_ON_INPUT = 4, SLOTS_FP32 = 8 };

template <class T>
__device__ __forceinline__ float router_weight(const MoEArgs& args, int flags, int slot) {
  return flags & WEIGHTS_FP32 ? static_cast<const float*>(args.topk_weights)[slot]
                              : T::to_float(static_cast<const typename T::Scalar*>(args.topk_weights)[slot]);
}

__device__ __forceinline__ int expert_of(const MoEArgs& args, int slot, bool ids64) {
  long long id = ids64 ? static_cast<const long long*>(args.topk_ids)[slot]
                       : static_cast<const int*>(args.topk_ids)[slot];
  if (id < 0 || id >= args.num_global_experts) return -1;
  int expert = args.expert_map ? args.expert_map[id] : static_cast<int>(id);
  return expert < args.num_experts ? expert : -1;
}

// Exclusive prefix sums of v over the block's threads, and the total; `partial` is [32] in shared memory.
__device__ __forceinline__ int block_prefix(int v, int* partial, int* total) {
  int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
  int sum = v;
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    int below = __shfl_up_sync(~0u, sum, d);
    if (lane >= d) sum += below;
  }
  __syncthreads();
  if (lane == 31) partial[warp] = sum;
  __syncthreads();
  int before = 0, all = 0;
  for (int w = 0; w < warps; w++) {
    if (w < warp) before += partial[w];
    all += partial[w];
  }
  *total = all;
  return before + sum - v;
}

// `counts` is [num_experts] in shared memory, `partial` [32].
template <int TOKEN_TILE>
__device__ void route(const MoEArgs& args, bool ids64, int* counts, int* partial) {
  int slots = args.tokens * args.top_k;
  for (int e = threadIdx.x; e < args.num_experts; e += blockDim.x) counts[e] = 0;
  __syncthreads();
  for (int slot = threadIdx.x; slot < slots; slot += blockDim.x) {
    int expert = expert_of(args, slot, ids64);
    args.slot_is_here[slot] = expert >= 0;
    if (expert >= 0) atomicAdd(&counts[expert], 1);
  }
  __syncthreads();

  int first_row = 0, first_tile = 0;
  for (int start = 0; start < args.num_experts; start += blockDim.x) {
    int expert = start + threadIdx.x;
    int rows = expert < args.num_experts ? counts[expert] : 0;
    int all_rows, all_tiles;
    int row = first_row + block_prefix(rows, partial, &all_rows);
    int tile = first_tile + block_prefix((rows + TOKEN_TILE - 1) / TOKEN_TILE, partial, &all_tiles);
    for (int r = 0; r < rows; r += TOKEN_TILE, tile++) {
      args.tile_expert[tile] = expert;
      args.tile_row[tile] = row + r;
      args.tile_rows[tile] = min(TOKEN_TILE, rows - r);
    }
    if (expert < args.num_experts) counts[expert] = row;  // from here on: where the expert's next row goes
    first_row += all_rows;
    first_tile += all_tiles;
  }
  if (threadIdx.x == 0) *args.tile_count = first_tile;
  __syncthreads();

  for (int slot = threadIdx.x; slot < slots; slot += blockDim.x) {
    int expert = expert_of(args, slot, ids64);
    if (expert >= 0) args.sorted_slots[atomicAdd(&counts[expert], 1)] = slot;
  }
}
