// Slots (token, k) -> rows sorted by expert, and tiles of up to TOKEN_TILE rows of one expert, in shared memory.
// Every block computes the same, so that no block waits for another: a row's number is a fixed function of the ids.
//
//   ids      slot 0: e2   slot 1: e0   slot 2: e2   slot 3: -1        TOKEN_TILE = 2
//   rows     0: slot 0 (e2)   1: slot 2 (e2)   2: slot 1 (e0)         (many slots: experts in their order)
//   tiles    (e2, row 0, 2 rows)   (e0, row 2, 1 row)
#pragma once
#include "decode_shape.cuh"
#include "route.cuh"

typedef unsigned short u16;
constexpr u16 NO_ROW = 0xffff;
constexpr int MAX_SLOTS = 2048, SLOTS_A_LANE = (MAX_SLOTS + THREADS - 1) / THREADS;  // of kernels/plan/decode.py

struct RowTile {
  u16 expert, row, rows;
};

struct Routes {  // lists in shared memory
  float* weights;                  // the router's, by row
  u16 *slot_of_row, *row_of_slot;  // NO_ROW where the slot reaches no expert of this rank
  RowTile* tiles;

  __device__ __forceinline__ Routes(char* lists, int slots) {
    weights = reinterpret_cast<float*>(lists);
    slot_of_row = reinterpret_cast<u16*>(weights + slots), row_of_slot = slot_of_row + slots;
    tiles = reinterpret_cast<RowTile*>(row_of_slot + slots);
  }
};

struct RouteCounts {
  int tiles, rows;
};

__device__ __forceinline__ int warp_prefix(int v) {  // exclusive
  int sum = v, lane = threadIdx.x & 31;
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    int below = __shfl_up_sync(~0u, sum, d);
    if (lane >= d) sum += below;
  }
  return sum - v;
}

__device__ __forceinline__ void put_tiles(RowTile* tiles, int expert, int row, int rows) {
#pragma unroll 1
  for (int r = 0; r < rows; r += TOKEN_TILE)
    *tiles++ = RowTile{static_cast<u16>(expert), static_cast<u16>(row + r), static_cast<u16>(min(TOKEN_TILE, rows - r))};
}

__device__ __forceinline__ void put_row(const Routes& routes, int slot, int row, float weight) {
  routes.row_of_slot[slot] = row, routes.slot_of_row[row] = slot, routes.weights[row] = weight;
}

// Up to 32 slots: one warp, experts in the order of their first slots.
__device__ __forceinline__ RouteCounts route_few(const MoEArgs& args, int flags, const Routes& routes) {
  int slots = args.tokens * args.top_k, lane = threadIdx.x & 31;
  float weight = lane < slots ? router_weight<Type>(args, flags, lane) : 0.0f;
  int expert = lane < slots ? expert_of(args, lane, flags & IDS64) : -1;
  u32 same = __match_any_sync(~0u, expert);
  int first = __ffs(same) - 1, rows = __popc(same);
  bool leads = expert >= 0 && first == lane;
  int counts = leads ? rows | (rows + TOKEN_TILE - 1) / TOKEN_TILE << 16 : 0, before = warp_prefix(counts);
  int row = before & 0xffff;
  if (leads) put_tiles(routes.tiles + (before >> 16), expert, row, rows);
  row = __shfl_sync(~0u, row, first) + __popc(same & ((1u << lane) - 1));
  if (lane < slots && expert < 0) routes.row_of_slot[lane] = NO_ROW;
  if (expert >= 0) put_row(routes, lane, row, weight);
  int all = __shfl_sync(~0u, before + counts, 31);
  return RouteCounts{all >> 16, all & 0xffff};
}

// Any number of slots: each warp counts a run of them, a thread per expert adds the warps' counts up.
// `counts` is [WARPS, num_experts], `partial` [32], both in shared memory; all threads call it.
__device__ __forceinline__ RouteCounts route_many(const MoEArgs& args, int flags, const Routes& routes, u16* counts, int* partial) {
  int slots = args.tokens * args.top_k, lane = threadIdx.x & 31, warp = threadIdx.x >> 5, experts = args.num_experts;
  int runs = (slots + THREADS - 1) / THREADS, first = warp * runs * 32 + lane;  // this lane's slots: first, first + 32, ...
  if (warp >= WARPS) first = slots;
  int expert[SLOTS_A_LANE], place[SLOTS_A_LANE];
  float weight[SLOTS_A_LANE];
#pragma unroll
  for (int i = 0; i < SLOTS_A_LANE; i++) {
    int slot = first + 32 * i;
    expert[i] = -1;
    if (i < runs && slot < slots) expert[i] = expert_of(args, slot, flags & IDS64), weight[i] = router_weight<Type>(args, flags, slot);
  }
  for (int i = threadIdx.x; i < WARPS * experts / 2; i += blockDim.x) reinterpret_cast<u32*>(counts)[i] = 0;
  __syncthreads();
  u16* mine = counts + min(warp, WARPS - 1) * experts;
#pragma unroll
  for (int i = 0; i < SLOTS_A_LANE; i++) {
    if (i >= runs) break;
    u32 same = __match_any_sync(~0u, expert[i]);
    if (expert[i] >= 0) place[i] = mine[expert[i]] + __popc(same & ((1u << lane) - 1));
    __syncwarp();
    if (expert[i] >= 0 && __ffs(same) - 1 == lane) mine[expert[i]] += __popc(same);
    __syncwarp();
  }
  __syncthreads();
  int before_all = 0;  // rows, and tiles in the upper half
#pragma unroll 1
  for (int start = 0; start < experts; start += blockDim.x) {
    int e = start + threadIdx.x, rows = 0, count[WARPS];
#pragma unroll
    for (int w = 0; w < WARPS; w++) count[w] = e < experts ? counts[w * experts + e] : 0, rows += count[w];
    int all, before = before_all + block_prefix(rows | (rows + TOKEN_TILE - 1) / TOKEN_TILE << 16, partial, &all), row = before & 0xffff;
    put_tiles(routes.tiles + (before >> 16), e, row, rows);
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
      if (e < experts) counts[w * experts + e] = row;
      row += count[w];
    }
    before_all += all;
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < SLOTS_A_LANE; i++) {
    int slot = first + 32 * i;
    if (i >= runs || slot >= slots) break;
    if (expert[i] >= 0) put_row(routes, slot, mine[expert[i]] + place[i], weight[i]);
    else routes.row_of_slot[slot] = NO_ROW;
  }
  return RouteCounts{before_all >> 16, before_all & 0xffff};
}
