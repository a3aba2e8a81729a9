// Who does what, the same arithmetic in every block. A block's warps are teams of eight, one per column block of a stage.
//
// GEMM 1: all slots along K of all (tile, strip of columns) in a row, cut into gridDim.x equal ranges. A block's part
//   of one (tile, strip) is a piece; the teams take its slots in turn. A (tile, strip) that several blocks share has
//   several pieces, whose sums are added when they are read.
// GEMM 2: tasks (tile, part of K, eight column blocks) in a row, cut likewise; the teams take tasks in turn. A segment
//   is a (tile, part of K), and a window as many segments as have room for their activations at once.
#pragma once
#include "decode_route.cuh"

struct Work {
  int tiles, rows;
  int part_slots, parts;  // of w2's K: slots in a part, parts
  int window;             // segments in a window
  u32 granules, tasks;    // in all: slots of GEMM 1, tasks of GEMM 2
  u32 first_blocks;       // that take part in GEMM 1: each has a slot at least, so that no piece is empty

  __device__ __forceinline__ u32 first_granule(u32 block) const { return block < first_blocks ? block * granules / first_blocks : granules; }
  __device__ __forceinline__ u32 first_task(int block) const { return block * tasks / gridDim.x; }
  __device__ __forceinline__ int owner(u32 granule) const { return ((granule + 1) * first_blocks - 1) / granules; }
  __device__ __forceinline__ int first_owner(u32 unit) const { return owner(unit * SLOTS1); }
  __device__ __forceinline__ int pieces(u32 unit) const { return owner(unit * SLOTS1 + SLOTS1 - 1) - first_owner(unit) + 1; }

  // Where the window that begins with a task of this block ends. In each window the teams start anew.
  __device__ __forceinline__ u32 window_end(u32 task) const {
    u32 begin = first_task(blockIdx.x), first = begin / GROUPS2, which = (task / GROUPS2 - first) / window;
    return min((first + (which + 1) * window) * GROUPS2, first_task(blockIdx.x + 1));
  }
};

// A whole warp calls it: w2's K is cut where that makes the longest team's time shortest; every lane tries a number.
__device__ __forceinline__ Work plan_work(RouteCounts counts, int most_parts) {
  int tiles = counts.tiles, rows = counts.rows;
  constexpr int MOST = ACTIVATION_K / Slot<W2>::K, FEWEST = (SLOTS2 + MOST - 1) / MOST;
  int lane = threadIdx.x & 31, wanted = min(FEWEST + lane, max(FEWEST, most_parts));
  Work work;
  work.part_slots = (SLOTS2 + wanted - 1) / wanted;
  work.parts = (SLOTS2 + work.part_slots - 1) / work.part_slots;
  u32 in_block = (static_cast<u32>(tiles) * work.parts * GROUPS2 + gridDim.x - 1) / gridDim.x;
  // In units of 512 bytes: a slot's stage 36, a row's sums written and read 8, and as much again to begin a task.
  u32 cost = (in_block + TEAMS - 1) / TEAMS * (36 * work.part_slots + 8 * (rows / max(tiles, 1) + 1));
  int best = __reduce_min_sync(~0u, min(cost, 1u << 26) * 32 + lane) % 32;
  work.part_slots = __shfl_sync(~0u, work.part_slots, best);
  work.parts = __shfl_sync(~0u, work.parts, best);
  work.tiles = tiles, work.rows = rows;
  work.window = ACTIVATIONS_ELEMENTS / (TOKEN_TILE * (work.part_slots * Slot<W2>::K + 8));
  work.granules = tiles * STRIPS * SLOTS1, work.tasks = tiles * work.parts * GROUPS2;
  work.first_blocks = min(gridDim.x, work.granules);
  return work;
}

// A block's part of one (tile, strip) of GEMM 1: slots begin .. end along K.
struct Piece {
  u32 unit;
  int tile, strip, begin, end;
  __device__ __forceinline__ Piece(u32 at, u32 last) {
    unit = at / SLOTS1, tile = unit / STRIPS, strip = unit % STRIPS;
    begin = at % SLOTS1, end = min(static_cast<u32>(SLOTS1), begin + last - at);
  }
};

// The column block of w13 that warp n of a team has in a strip, or -1: gate blocks, then the up blocks of the same columns.
__device__ __forceinline__ int strip_block(int strip, int n) {
  constexpr int HALF = GATED ? STAGE_BLOCKS / 2 : STAGE_BLOCKS, BLOCKS = INTERMEDIATE / 64;
  int block = strip * HALF + n % HALF;
  return block < BLOCKS ? block + (n >= HALF ? BLOCKS : 0) : -1;
}

// A task of GEMM 2: slots begin .. end along K of `blocks` column blocks from `block` on.
struct Task {
  int segment, tile, part, block, blocks, begin, end;
  __device__ __forceinline__ Task(const Work& work, u32 q) {
    segment = q / GROUPS2, tile = segment / work.parts, part = segment % work.parts;
    block = q % GROUPS2 * STAGE_BLOCKS, blocks = min(STAGE_BLOCKS, BLOCKS2 - block);
    begin = part * work.part_slots, end = min(begin + work.part_slots, SLOTS2);
  }
};
