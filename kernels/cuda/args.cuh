// What the kernel is told: one struct, the same on host (kernels/backends/cuda_arguments.py) and device.
// Letters: M tokens, T top_k, E experts of this rank, H hidden size, I padded intermediate size, rows <= M*T.
#pragma once

typedef unsigned int u32;
typedef unsigned long long u64;

struct MatrixArgs {         // one projection, K x N, G groups along K
  const u32* qweight;       // [E, K/16, N*bits/2]
  const void* scales;       // [E, G, N]
  const u32* zero_points;   // [E, G, N*bits/32], or null
  const int* sort_order;    // [E, K], or null
  const void* bias;         // [E, N], or null
};

struct MoEArgs {
  const void* x;             // [M, H], rows x_stride elements apart
  const void* topk_weights;  // [M, T]
  const void* topk_ids;      // [M, T]
  const int* expert_map;     // [num_global_experts], or null
  MatrixArgs w13, w2;
  void* out;                 // [M, H], rows out_stride elements apart
  int* tile_count;           // [1]             scratch from here on; nothing in it survives the call
  int* sorted_slots;         // [M*T]           token * T + slot of each row, rows of one expert together
  int* slot_is_here;         // [M*T]           1 where the slot reaches an expert of this rank
  int* tile_expert;          // [tiles]         token tiles of GEMM 1 and GEMM 2
  int* tile_row;             // [tiles]         the tile's first row
  int* tile_rows;            // [tiles]         its rows, at most TOKEN_TILE
  void* activations;         // [M*T, I]        by row
  void* w2_output;           // [M*T, H]        by slot; fp32 where the flag SLOTS_FP32 says so, then also per split
  float* split_sums;         // [split_capacity, TOKEN_TILE, 128]  sums of GEMM 1 where K is split over blocks
  long long x_stride, out_stride;
  int tokens, top_k, num_experts, num_global_experts, hidden_size, intermediate_size, activation;
  int split_capacity, most_slot_splits;
  float routed_scaling_factor, alpha, limit, beta, linear_beta;
};
