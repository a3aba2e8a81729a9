// The result: the rows that GEMM 2 has written, summed over a token's slots in their order.
#pragma once
#include "decode_exchange.cuh"

// A sum over K of w2 with its scale or bias, where it has those outside of the groups; not in line, for it is rare.
__device__ __noinline__ float finish_apart(float sum, const MoEArgs& args, int expert, int column) {
  return finish<Type, W2>(sum * Type::SUM_FACTOR, args.w2, expert, column, HIDDEN, 1.0f);
}

// Four columns of one row of GEMM 2, summed over parts of K, times the router's weight: added to `total`.
__device__ __forceinline__ void add_row(FourSums& total, FourSums row, const MoEArgs& args, int expert, int column, float weight) {
  bool apart = W2::GROUP == 0 || args.w2.bias;
  float factor = apart ? weight : weight * Type::SUM_FACTOR;
  if (apart)
    for (int i = 0; i < 4; i++) row.v[i] = finish_apart(row.v[i], args, expert, column + i);
#pragma unroll
  for (int i = 0; i < 4; i++) total.v[i] += row.v[i] * factor;
}

constexpr int SLOTS_AT_ONCE = 2, PARTS_AT_ONCE = 4;  // whose rows are on their way together

// Adds up to PARTS_AT_ONCE parts of K, `count` of which there are, to each slot's sum.
__device__ __forceinline__ void add_parts(FourSums (&slots)[SLOTS_AT_ONCE], const int (&row)[SLOTS_AT_ONCE], const float* from, int count, u64 step) {
  float4 w[SLOTS_AT_ONCE][PARTS_AT_ONCE];
#pragma unroll
  for (int i = 0; i < SLOTS_AT_ONCE; i++) read_fours(w[i], from + static_cast<u64>(row[i]) * HIDDEN, row[i] == NO_ROW ? 0 : count, step);
#pragma unroll
  for (int i = 0; i < SLOTS_AT_ONCE; i++) slots[i].add(w[i]);
}

// The sum over a token's slots and their parts of K, for all tokens. Lanes share four columns where tokens are few.
__device__ __forceinline__ void add_slots(const MoEArgs& args, const Work& work, const Routes& routes, int flags) {
  constexpr int FOURS = HIDDEN / 4;
  int items = args.tokens * FOURS, log = 3, warps = gridDim.x * WARPS, lane = threadIdx.x & 31;
  while (log > 0 && (args.top_k >> log == 0 || items << log > warps * 32)) log--;
  int sub = lane & ((1 << log) - 1), per_warp = 32 >> log, warp = threadIdx.x / 32 * gridDim.x + blockIdx.x;
  const float* rows = static_cast<const float*>(args.w2_output);
  u64 part_elements = static_cast<u64>(work.rows) * HIDDEN;
#pragma unroll 1
  for (int at = warp * per_warp; at < items; at += warps * per_warp) {
    int item = at + (lane >> log), token = min(item, items - 1) / FOURS, column = min(item, items - 1) % FOURS * 4;
    FourSums total;
#pragma unroll 1
    for (int k = sub; k < args.top_k; k += SLOTS_AT_ONCE << log) {
      FourSums slots[SLOTS_AT_ONCE];
      int row[SLOTS_AT_ONCE], first = token * args.top_k + k;
#pragma unroll
      for (int i = 0; i < SLOTS_AT_ONCE; i++) row[i] = k + (i << log) < args.top_k ? routes.row_of_slot[first + (i << log)] : NO_ROW;
      const float* from = rows + column;
#pragma unroll 1
      for (int count = work.parts; count > 0; count -= PARTS_AT_ONCE, from += PARTS_AT_ONCE * part_elements)
        add_parts(slots, row, from, count, part_elements);
#pragma unroll
      for (int i = 0; i < SLOTS_AT_ONCE; i++)
        if (row[i] != NO_ROW) {
          int expert = W2::GROUP == 0 || args.w2.bias ? expert_of(args, first + (i << log), flags & IDS64) : 0;
          add_row(total, slots[i], args, expert, column, flags & WEIGHT_ON_INPUT ? 1.0f : routes.weights[row[i]]);
        }
    }
    total.over_lanes(1 << log);
    if (item >= items) continue;
    Scalar* out = static_cast<Scalar*>(args.out) + token * args.out_stride + column;
#pragma unroll 1
    for (int i = sub; i < 4; i += 1 << log) out[i] = Type::from_float(total[i] * args.routed_scaling_factor);
  }
}
