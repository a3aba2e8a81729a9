// The producer warpgroup of a prefill block: work items, weights with their scales, and tokens, into the ring.
//
//   warp 0        one lane: takes the next work item, tells everybody, and has the copy engine fetch the item's weights,
//                 scales and zero points, in GEMM 2 also its tokens, whose rows stand together
//   warps 1 .. 3  GEMM 1: gather the rows of x by cp.async
#pragma once
#include "prefill_ring.cuh"

struct WeightMaps {  // boxes of 128 columns: 4 rows of words; the scales and zero points of a stage
  const TensorMap &words, &scales, &zeros;
};

// Which columns the two halves of a tile start at.
struct Halves {
  int starts[2];
  template <bool PAIRED>  // gate and up of the same 128 columns, else 256 neighbours
  static __device__ __forceinline__ Halves of(int column_tile, int intermediate_size) {
    int start = column_tile * HALF_COLUMNS * (PAIRED ? 1 : 2);
    return {start, start + (PAIRED ? intermediate_size : HALF_COLUMNS)};
  }
};

// The items in order: by expert, then column tile, then token tile, so that blocks that run at the same time share
// weights and tokens in L2. The one after the next is asked for before it is needed.
struct Schedule {
  const PrefillArgs& args;
  int columns, which;
  int total, item, later;  // later: not yet less than total
  int4 what, where;        // TokenTile of `item`

  __device__ __forceinline__ Schedule(const PrefillArgs& args_, int columns_, int which_)
      : args(args_), columns(columns_), which(which_) {
    total = args.counters->tiles * columns;
    item = blockIdx.x;
    fetch();
    later = take();
  }
  __device__ __forceinline__ int take() { return gridDim.x + atomicAdd(&args.counters->next[which], 1); }
  __device__ __forceinline__ void fetch() {
    if (item >= total) return;
    const int4* tile = reinterpret_cast<const int4*>(args.token_tiles + item / columns);
    what = tile[0], where = tile[1];
  }
  __device__ __forceinline__ WorkItem next() {
    if (item >= total) return {};
    int place = item - where.x * columns, column_tile = place / where.y, tile = place - column_tile * where.y;
    WorkItem found = {what.x, column_tile, what.y + tile * what.w, min(what.w, what.z - tile * what.w),
                      tile == where.y - 1 ? where.w : where.z};
    item = later;
    fetch();
    later = take();
    return found;
  }
};

template <class L>
__device__ __forceinline__ void tell_item(u32 base, Turn<QUEUE>& turn, const WorkItem& item) {
  wait(L::item_read(base, turn.at), turn.parity ^ 1);
  store_shared(L::item(base, turn.at), make_uint4(item.expert, item.column_tile, item.row, item.rows));
  store_shared(L::item(base, turn.at) + 16, make_uint4(item.width, 0, 0, 0));
  arrive(L::item_there(base, turn.at));
  turn.next();
}

template <class L>  // by whole warps
__device__ __forceinline__ WorkItem hear_item(u32 base, Turn<QUEUE>& turn) {
  wait(L::item_there(base, turn.at), turn.parity);
  uint4 v = load_shared<uint4>(L::item(base, turn.at));
  int width = load_shared<u32>(L::item(base, turn.at) + 16);
  __syncwarp();
  if ((threadIdx.x & 31) == 0) arrive(L::item_read(base, turn.at));
  turn.next();
  return {static_cast<int>(v.x), static_cast<int>(v.y), static_cast<int>(v.z), static_cast<int>(v.w), width};
}

// One thread. TOKENS: `tokens` are copied too, 16 rows of 64 inputs a box.
template <class F, class L, int STAGES, bool PAIRED, bool TOKENS>
__device__ __forceinline__ void load_weights(u32 base, const PrefillArgs& args, const WeightMaps& maps,
                                             const TensorMap& tokens, int size_k, int columns) {
  constexpr int BYTES = L::WEIGHTS + 2 * (L::HALF_SCALES + L::HALF_ZEROS), GROUP_K = F::GROUP ? F::GROUP : STAGE_K;
  Schedule schedule(args, columns, TOKENS);
  Turn<STAGES> turn;
  Turn<QUEUE> queue;
  for (;;) {
    WorkItem item = schedule.next();
    tell_item<L>(base, queue, item);
    if (!item.width) return;
    Halves halves = Halves::of<PAIRED>(item.column_tile, args.intermediate_size);
    int row = item.expert * (size_k / 16), group = item.expert * (size_k / GROUP_K);
    int boxes = TOKENS ? (item.width + 15) / 16 : 0;
#pragma unroll 1
    for (int k = 0; k < size_k; k += STAGE_K, turn.next()) {
      u32 full = L::full(base, turn.at);
      wait(L::empty(base, turn.at), turn.parity ^ 1);
      arrive_expecting(full, BYTES + boxes * 16 * STAGE_K * 2);
#pragma unroll
      for (int h = 0; h < 2; h++) {
        copy_box(L::weights(base, turn.at) + h * L::HALF, maps.words, halves.starts[h] * F::BITS / 4, row + k / 16, full);
        if (L::HALF_SCALES)
          copy_box(L::scales(base, turn.at) + h * L::HALF_SCALES, maps.scales, halves.starts[h], group + k / GROUP_K, full);
        if (L::HALF_ZEROS)
          copy_box(L::zeros(base, turn.at) + h * L::ZEROS_STEP, maps.zeros, halves.starts[h] * F::BITS / 32, group + k / GROUP_K, full);
      }
      for (int b = 0; b < boxes; b++)
        copy_box(L::tokens(base, turn.at) + b * 16 * STAGE_K * 2, tokens, k, item.row + 16 * b, full);
    }
  }
}

__device__ __forceinline__ void copy_piece(u32 to, const char* from) {  // 16 bytes
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

// By a whole warp, whose copies have arrived: the fence makes them visible to wgmma, here and not in the warps that multiply.
__device__ __forceinline__ void announce_tokens(u32 full) {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncwarp();
  if ((threadIdx.x & 31) == 0) arrive(full);
}

// Where a row's token lies in x, in bytes, which are below 4 GiB: kernels/plan/prefill.py.
__device__ __forceinline__ u32 offset_of(const PrefillArgs& args, int row) {
  return static_cast<u32>(args.routed_rows[row].slot) / static_cast<u32>(args.top_k) * (static_cast<u32>(args.x_stride) * 2);
}

// Narrow tiles: each of the warps 1 .. 3 has every third stage, all of its rows. Together they would issue three times as
// many instructions for barriers and addresses, which at few rows are most of them.
template <class L, int TOKEN_TILE, int STAGES>
__device__ __forceinline__ void gather_stages(u32 base, const PrefillArgs& args, int size_k) {
  constexpr int ROWS = 4, MINE = (TOKEN_TILE + ROWS - 1) / ROWS, LOOKED_UP = (TOKEN_TILE + 31) / 32;
  static_assert(STAGES >= GATHER_WARPS, "a warp's next stage is at most one round of the ring further");
  int lane = threadIdx.x & 31, warp = __shfl_sync(~0u, (threadIdx.x >> 5) - 1, 0), first = lane >> 3, piece = lane & 7;
  u32 even = first * 128 + (piece ^ first) * 16, odd = first * 128 + (piece ^ first ^ 4) * 16;
  Turn<STAGES> turn;
  for (int i = 0; i < warp; i++) turn.next();
  Turn<QUEUE> queue;
  int stages = size_k / STAGE_K, stage = warp;  // of the item, the warp's next
  for (;;) {
    WorkItem item = hear_item<L>(base, queue);
    if (!item.width) break;
    u32 looked_up[LOOKED_UP] = {};  // a row a lane
#pragma unroll
    for (int i = 0; i < LOOKED_UP; i++)
      if (lane + 32 * i < item.rows) looked_up[i] = offset_of(args, item.row + lane + 32 * i);
    u32 offsets[MINE];  // of the rows that this lane copies a piece of
#pragma unroll
    for (int i = 0; i < MINE; i++) offsets[i] = __shfl_sync(~0u, looked_up[i / 8], ROWS * (i & 7) + first) + piece * 16;
    int rows = item.rows - first;
#pragma unroll 1
    for (; stage < stages; stage += GATHER_WARPS) {
      wait(L::empty(base, turn.at), turn.parity ^ 1);
      const char* x = static_cast<const char*>(args.x) + stage * (STAGE_K * 2);
      u32 to = L::tokens(base, turn.at);
#pragma unroll
      for (int i = 0; i < MINE; i++)
        if (ROWS * i < rows) copy_piece(to + (i & 1 ? odd : even) + i * ROWS * 128, x + offsets[i]);
      commit_copies();
      wait_for_copies();
      announce_tokens(L::full(base, turn.at));
      turn.template skip<GATHER_WARPS>();
    }
    stage -= stages;
  }
}

// Wide tiles: the warps 1 .. 3 have a third of every stage's rows. A stage is announced when copies have been started for
// LAG more: then its own have arrived. More than two ahead made the multiplying warps wait for announcements; and LAG
// must stay below STAGES - 1, since a stage is released when the next one has arrived.
template <class L, int TOKEN_TILE, int STAGES>
__device__ __forceinline__ void gather_rows(u32 base, const PrefillArgs& args, int size_k) {
  constexpr int THREADS = 32 * GATHER_WARPS, ROWS = THREADS / 8, MINE = (TOKEN_TILE + ROWS - 1) / ROWS;
  constexpr int LAG = STAGES - 2 < 2 ? STAGES - 2 : 2;
  static_assert(LAG > 0, "a ring of three stages at least");
  int thread = threadIdx.x - 32, first = thread >> 3, piece = thread & 7;
  int swizzled = piece ^ (first & 7);
  static_assert(ROWS % 8 == 4, "the next row of a thread is four rows of the swizzle further");
  Turn<STAGES> turn, arrived;
  Turn<QUEUE> queue;
  int ahead = 0;
  auto announce = [&]() {
    announce_tokens(L::full(base, arrived.at));
    arrived.next();
  };
  for (;;) {
    WorkItem item = hear_item<L>(base, queue);
    if (!item.width) break;
    u32 offsets[MINE];  // of this thread's rows, in bytes
#pragma unroll
    for (int i = 0; i < MINE; i++)
      if (first + ROWS * i < item.rows) offsets[i] = offset_of(args, item.row + first + ROWS * i) + piece * 16;
    const char* x = static_cast<const char*>(args.x);
#pragma unroll 1
    for (int k = 0; k < size_k; k += STAGE_K, turn.next(), x += STAGE_K * 2) {
      wait(L::empty(base, turn.at), turn.parity ^ 1);
      u32 to = L::tokens(base, turn.at) + first * 128, even = to + swizzled * 16, odd = to + (swizzled ^ 4) * 16;
#pragma unroll
      for (int i = 0; i < MINE; i++)
        if (first + ROWS * i < item.rows) copy_piece((i & 1 ? odd : even) + i * ROWS * 128, x + offsets[i]);
      commit_copies();
      if (++ahead > LAG) {
        wait_for_older_copies<LAG>();
        announce();
        ahead = LAG;
      }
    }
    wait_for_copies();  // nobody waits for these while the next item's rows are looked up
    for (; ahead > 0; ahead--) announce();
  }
}

template <class L, int TOKEN_TILE, int STAGES>
__device__ __forceinline__ void gather_tokens(u32 base, const PrefillArgs& args, int size_k) {
  if constexpr (L::GATHERED_BY == 1)
    gather_stages<L, TOKEN_TILE, STAGES>(base, args, size_k);
  else
    gather_rows<L, TOKEN_TILE, STAGES>(base, args, size_k);
}
