// What the prefill kernels are told: one struct, the same on host (kernels/backends/prefill_arguments.py) and device.
// Letters: M tokens, T top_k, E experts of this rank, H hidden size, I padded intermediate size, rows <= M*T.
#pragma once
#include "args.cuh"

struct TokenTile {         // one of the tiles into which an expert's rows are cut; each says all about all of them
  int expert, row, rows;   // of the expert: its first row, and how many
  int share;               // rows of a tile, but for the last
  int first, count;        // the expert's tiles
  int width, last_width;   // of the wgmma: a tile's rows, rounded up to one of the kernel's widths
};

struct RoutedRow {  // a slot of an expert of this rank; rows of one expert stand together
  int slot;         // token * T + k
  float weight;     // of the router
};

struct Counters {
  int tiles;
  int next[2];  // the next work item of GEMM 1 and 2, counted from the grid's size on
};

enum PrefillFlags { IDS64 = 1, WEIGHTS_FP32 = 2, WEIGHT_ON_INPUT = 4, DIRECT = 8, OUT_ALIGNED = 16 };

struct PrefillArgs {
  const void* x;             // [M, H], rows x_stride elements apart
  const void* topk_weights;  // [M, T]
  const void* topk_ids;      // [M, T]
  const int* expert_map;     // [num_global_experts], or null
  MatrixArgs w13, w2;
  void* out;                 // [M, H], rows out_stride elements apart
  Counters* counters;        //                 scratch from here on; nothing in it survives the call
  RoutedRow* routed_rows;    // [M*T]
  int* slot_is_here;         // [M*T]           1 where the slot reaches an expert of this rank
  TokenTile* token_tiles;    // [tiles]         by expert
  void* activations;         // [M*T, I]        by row
  void* w2_output;           // [M*T, H]        by slot; not used where DIRECT: top_k 1, GEMM 2 writes `out`
  long long x_stride, out_stride;
  int tokens, top_k, num_experts, num_global_experts, hidden_size, intermediate_size, activation;
  int token_tile;            // the most rows of a token tile
  u32 widths;                // bit i: the kernels have width 8i
  int flags;
  float routed_scaling_factor, alpha, limit, beta, linear_beta;
};
static_assert(sizeof(PrefillArgs) == 248, "as kernels/backends/prefill_arguments.py packs it");
