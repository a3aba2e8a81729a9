// A token's result. Whoever stores the last of the rows that it takes in some columns adds them up, in the order of the
// token's slots, so that equal calls give equal bits whoever it is.
#pragma once
#include "decode_exchange.cuh"

constexpr int TEAM_THREADS = 32 * STAGE_BLOCKS, TOGETHER = 4;  // slots whose rows are read at once

// A sum over K of w2 with its scale or bias, where it has those outside of the groups; not in line, for it is rare.
__device__ __noinline__ float finish_apart(float sum, const MoEArgs& args, int expert, int column) {
  return finish<Type, W2>(sum * Type::SUM_FACTOR, args.w2, expert, column, HIDDEN, 1.0f);
}

struct Totals {
  const MoEArgs& args;
  const Work& work;
  const Routes& routes;
  int flags;

  // Tasks whose rows are there: [tokens, GROUPS2], behind which the sums of GEMM 1 lie.
  __device__ __forceinline__ int* arrived() const { return reinterpret_cast<int*>(args.split_sums); }
  __device__ __forceinline__ float* first_sums() const { return args.split_sums + (args.tokens * GROUPS2 + 3) / 4 * 4; }

  // All blocks' consumers call it, before the grid's barrier.
  __device__ __forceinline__ void clear() const {
    for (int i = blockIdx.x * THREADS + threadIdx.x; i < args.tokens * GROUPS2; i += gridDim.x * THREADS) arrived()[i] = 0;
  }

  __device__ __forceinline__ int rows_of(int token) const {
    int rows = 0;
#pragma unroll 4
    for (int k = 0; k < args.top_k; k++) rows += routes.row_of_slot[token * args.top_k + k] != NO_ROW;
    return rows;
  }

  // A warp counts a task's rows, once all of them are stored: which of the tile's rows were the last of their tokens?
  __device__ __forceinline__ u32 count(RowTile tile, int group) const {
    int lane = threadIdx.x & 31;
    bool last = false;
    if (lane < tile.rows) {
      int token = routes.slot_of_row[tile.row + lane] / args.top_k, needed = rows_of(token) * work.parts;
      fence_device();
      last = atomicAdd(arrived() + token * GROUPS2 + group, 1) + 1 == needed;
    }
    u32 all = __ballot_sync(~0u, last);
    if (all) fence_device();
    return all;
  }

  // A team's threads write a token's result in `columns` columns from `first` on; two of them share four columns.
  __device__ __forceinline__ void add(int token, int first, int columns) const {
    int thread = threadIdx.x % TEAM_THREADS, sub = thread & 1, offset = thread / 2 * 4;
    const float* from = static_cast<const float*>(args.w2_output) + first + offset;
    u64 part_elements = static_cast<u64>(work.rows) * HIDDEN;
    FourSums total;
#pragma unroll 1
    for (int k = sub; k < args.top_k && offset < columns; k += 2 * TOGETHER) {
      FourSums slots[TOGETHER];
      int rows[TOGETHER];
#pragma unroll
      for (int i = 0; i < TOGETHER; i++) rows[i] = k + 2 * i < args.top_k ? routes.row_of_slot[token * args.top_k + k + 2 * i] : NO_ROW;
#pragma unroll 2
      for (int part = 0; part < work.parts; part++)
#pragma unroll
        for (int i = 0; i < TOGETHER; i++)
          if (rows[i] != NO_ROW) slots[i].add(from + part * part_elements + static_cast<u64>(rows[i]) * HIDDEN);
#pragma unroll
      for (int i = 0; i < TOGETHER; i++)
        if (rows[i] != NO_ROW) add_row(total, slots[i], token * args.top_k + k + 2 * i, rows[i], first + offset);
    }
    total.over_lanes(2);
    if (offset < columns) put(token, first + offset + 2 * sub, sub ? total.v[2] : total.v[0], sub ? total.v[3] : total.v[1]);
  }

  // Tokens without a row here; all blocks' consumers call it.
  __device__ __forceinline__ void zeros() const {
#pragma unroll 1
    for (int token = blockIdx.x; token < args.tokens; token += gridDim.x)
      if (rows_of(token) == 0)
        for (int column = 2 * threadIdx.x; column < HIDDEN; column += 2 * THREADS) put(token, column, 0.0f, 0.0f);
  }

 private:
  // A slot's four columns, summed over parts of K, times the router's weight: added to `total`.
  __device__ __forceinline__ void add_row(FourSums& total, FourSums slot, int number, int row, int column) const {
    bool apart = W2::GROUP == 0 || args.w2.bias;
    float weight = flags & WEIGHT_ON_INPUT ? 1.0f : routes.weights[row], factor = apart ? weight : weight * Type::SUM_FACTOR;
    if (apart) {
      int expert = expert_of(args, number, flags & IDS64);
#pragma unroll
      for (int i = 0; i < 4; i++) slot.v[i] = finish_apart(slot.v[i], args, expert, column + i);
    }
#pragma unroll
    for (int i = 0; i < 4; i++) total.v[i] += slot.v[i] * factor;
  }

  __device__ __forceinline__ void put(int token, int column, float one, float two) const {
    Scalar* out = static_cast<Scalar*>(args.out) + token * args.out_stride + column;
    out[0] = Type::from_float(one * args.routed_scaling_factor), out[1] = Type::from_float(two * args.routed_scaling_factor);
  }
};
