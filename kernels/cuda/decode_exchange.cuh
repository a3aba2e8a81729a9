// What blocks tell each other through memory: sums of GEMM 1's pieces, and the activations that are made of them.
// Every sum has a fixed order, so that equal calls give equal bits.
#pragma once
#include "activation.cuh"
#include "decode_gemm.cuh"
#include "decode_work.cuh"
#include "finish.cuh"

// A warp's sums of 64 columns, of rows 0 .. rows - 1, to `to` [rows][row_elements].
__device__ __forceinline__ void store_sums(float* to, const WarpSums<OCTETS>& sums, int rows, int row_elements) {
  int lane = threadIdx.x & 31, g = lane >> 2, m = lane & 3;
#pragma unroll
  for (int o = 0; o < OCTETS; o++)
#pragma unroll
    for (int i = 0; i < 2; i++) {
      int row = 8 * o + 2 * m + i;
      if (row >= rows) continue;
#pragma unroll
      for (int j = 0; j < 4; j++)
#pragma unroll
        for (int half = 0; half < 2; half++) to[row * row_elements + 16 * j + 8 * half + g] = sums.d[j][o][2 * half + i];
    }
}

// Adds the sums of the other teams into those of team 0, in their order, one octet of tokens at a time.
__device__ __forceinline__ void add_teams(WarpSums<OCTETS>& sums, float4* exchange, int team, int n, int rows) {
  int lane = threadIdx.x & 31;
#pragma unroll
  for (int o = 0; o < OCTETS; o++) {
    if (8 * o >= rows) return;
    sync_consumers();
    if (team > 0)
#pragma unroll
      for (int j = 0; j < 4; j++)
        exchange[(((team - 1) * STAGE_BLOCKS + n) * 4 + j) * 32 + lane] = *reinterpret_cast<float4*>(sums.d[j][o]);
    sync_consumers();
    if (team == 0)
#pragma unroll
      for (int p = 0; p < TEAMS - 1; p++)
#pragma unroll
        for (int j = 0; j < 4; j++) {
          float4 v = exchange[((p * STAGE_BLOCKS + n) * 4 + j) * 32 + lane];
          sums.d[j][o][0] += v.x, sums.d[j][o][1] += v.y, sums.d[j][o][2] += v.z, sums.d[j][o][3] += v.w;
        }
  }
}

// Fours that lie `step` apart, on their way together; zeros from number `count` on.
template <int MOST>
__device__ __forceinline__ void read_fours(float4 (&w)[MOST], const float* from, int count, u64 step) {
#pragma unroll
  for (int i = 0; i < MOST; i++) w[i] = i < count ? __ldcg(reinterpret_cast<const float4*>(from + i * step)) : make_float4(0, 0, 0, 0);
}

// Four columns that `lanes` neighbouring lanes (1, 2, 4 or 8) add up together.
struct FourSums {
  float v[4] = {};
  template <int MOST>
  __device__ __forceinline__ void add(const float4 (&w)[MOST]) {
#pragma unroll
    for (int i = 0; i < MOST; i++) v[0] += w[i].x, v[1] += w[i].y, v[2] += w[i].z, v[3] += w[i].w;
  }
  __device__ __forceinline__ void over_lanes(int lanes) {
#pragma unroll 1
    for (int d = 1; d < lanes; d *= 2)
#pragma unroll
      for (int i = 0; i < 4; i++) v[i] += __shfl_xor_sync(~0u, v[i], d);
  }
  __device__ __forceinline__ float operator[](int i) const { return i < 2 ? (i ? v[1] : v[0]) : (i == 2 ? v[2] : v[3]); }
};

// Rows whose activations a block holds at a time: of each segment of the window those of its tile.
struct Window {  // in shared memory
  int row_count, items;  // an item is four columns of a row
  int log_lanes;         // lanes that share an item: as many as there are threads for, where its sum has many pieces
  u16 segment[ACTIVATIONS_ELEMENTS / 40], row[ACTIVATIONS_ELEMENTS / 40];  // of the window; of the segment's tile
};

// One of a thread's activations: four columns of a row of the window, which some neighbouring lanes share.
struct Item {
  const float* sums;  // of this lane's first piece
  int pieces;         // 0: there is no such item
  int expert, row, column, to;

  // `index` counts lanes: those of item 0, those of item 1, ...
  __device__ __forceinline__ void find(const MoEArgs& args, const Work& work, const Routes& routes, const Window& window, int first_segment, int index) {
    int item = index >> window.log_lanes, sub = index & ((1 << window.log_lanes) - 1), which = work.by_fours.quotient(item);
    pieces = 0;
    if (which >= window.row_count) return;
    int segment = first_segment + window.segment[which], tile = work.by_parts.quotient(segment), four = item - which * work.fours;
    column = ((segment - tile * work.parts) * work.fours + four) * 4;
    if (column >= INTERMEDIATE) return;
    pieces = work.pieces(tile * STRIPS + column / STRIP_COLUMNS);
    expert = routes.tiles[tile].expert, row = routes.tiles[tile].row + window.row[which];
    sums = args.split_sums + (static_cast<u64>(sub) * work.rows + row) * SIZE_N1 + column;
    to = (window.segment[which] * TOKEN_TILE + window.row[which]) * (work.fours * 4 + 8) + four * 4;
  }
};

// activation(gate, up) of an item from the sums of all pieces, to its place among the block's activations.
__device__ __forceinline__ void activate_item(const MoEArgs& args, const Work& work, const Routes& routes, const Item& item, int lanes, Scalar* to, bool weighted) {
  int sub = threadIdx.x & (lanes - 1);
  u64 step = static_cast<u64>(lanes) * work.rows * SIZE_N1;
  constexpr int MOST = 3;
  const float* from = item.sums;
  FourSums gate, up;
#pragma unroll 1
  for (int count = (item.pieces - sub + lanes - 1) >> __ffs(lanes) - 1; count > 0; count -= MOST, from += MOST * step) {
    float4 gates[MOST], ups[MOST];
    read_fours(gates, from, count, step), read_fours(ups, from + INTERMEDIATE, GATED ? count : 0, step);
    gate.add(gates), up.add(ups);
  }
  gate.over_lanes(lanes);
  if (GATED) up.over_lanes(lanes);
  if (item.pieces == 0) return;
  float weight = weighted ? routes.weights[item.row] : 1.0f;
#pragma unroll 1
  for (int i = sub; i < 4; i += lanes) {
    float other = 0.0f, one = finish<Type, W13>(gate[i] * Type::SUM_FACTOR, args.w13, item.expert, item.column + i, SIZE_N1, weight);
    if (GATED) other = finish<Type, W13>(up[i] * Type::SUM_FACTOR, args.w13, item.expert, INTERMEDIATE + item.column + i, SIZE_N1, weight);
    to[item.to + i] = Type::from_float(activate(one, other, args));
  }
}
