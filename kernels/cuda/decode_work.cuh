// Who does what, the same arithmetic in every block. A block's warps are teams of eight, one per column block of a stage.
//
// GEMM 1: all slots along K of all (tile, strip of columns) in a row, cut into gridDim.x equal ranges. A block's part
//   of one (tile, strip) is a piece; the teams take its slots in turn. A (tile, strip) that several blocks share has
//   several pieces, whose sums are added when they are read.
// GEMM 2: tasks (tile, part of K, eight column blocks) in a row, cut likewise; the teams take tasks in turn. A segment
//   is a (tile, part of K), and a window as many segments as have room for their activations at once.
#pragma once
#include "decode_route.cuh"

// Numbers 0 .. all in equal ranges: `start` of owner b is b * step in fixed point, and no owner gets none.
struct Ranges {
  static constexpr int POINT = 10;  // more owners than 2^10 would need more
  u32 all, owners, step;
  float owners_per_number;

  __device__ __forceinline__ void cut(u32 numbers, u32 most_owners) {
    all = numbers, owners = min(most_owners, numbers);
    step = owners ? ((all << POINT) + owners - 1) / owners : 0;
    owners_per_number = __fdividef(1 << POINT, step);
  }
  __device__ __forceinline__ u32 start(u32 owner) const { return owner < owners ? static_cast<u64>(owner) * step >> POINT : all; }
  __device__ __forceinline__ u32 owner(u32 number) const {
    u32 near = min(static_cast<u32>(number * owners_per_number), owners - 1);
    return start(near) > number ? near - 1 : start(near + 1) <= number ? near + 1 : near;
  }
};

// Division by a number that many divide by: exact where their product is below 2^31.
struct Divisor {
  u32 factor;
  __device__ __forceinline__ void set(u32 divisor) { factor = ((1u << 31) + divisor - 1) / divisor; }
  __device__ __forceinline__ u32 quotient(u32 n) const { return static_cast<u64>(n) * factor >> 31; }
};

struct Work {
  int tiles, rows;
  Ranges granules;        // slots of GEMM 1, over blocks
  Ranges tasks;           // of GEMM 2, over blocks: planned while the first weights are on their way
  int part_slots, parts;  // of w2's K: slots in a part, parts
  int window;             // segments in a window
  int fours, log_lanes;   // activations of a row, in fours, and lanes that may share four of them
  Divisor by_parts, by_window, by_fours;

  __device__ __forceinline__ int pieces(u32 unit) const { return granules.owner(unit * SLOTS1 + SLOTS1 - 1) - granules.owner(unit * SLOTS1) + 1; }

  // Where the window that begins with a task of this block ends. In each window the teams start anew.
  __device__ __forceinline__ u32 window_end(u32 task) const {
    u32 begin = tasks.start(blockIdx.x), first = begin / GROUPS2, which = by_window.quotient(task / GROUPS2 - first);
    return min((first + (which + 1) * window) * GROUPS2, tasks.start(blockIdx.x + 1));
  }

  // What the producers must know before their first copies.
  __device__ __forceinline__ void plan_first(RouteCounts counts) {
    tiles = counts.tiles, rows = counts.rows;
    granules.cut(tiles * STRIPS * SLOTS1, gridDim.x);
  }

  // A whole warp calls it: w2's K is cut where that makes the longest team's time shortest; every lane tries a number.
  __device__ __forceinline__ void plan_second(int most_parts) {
    constexpr int MOST = ACTIVATION_K / Slot<W2>::K, FEWEST = (SLOTS2 + MOST - 1) / MOST;
    int lane = threadIdx.x & 31, wanted = min(FEWEST + lane, max(FEWEST, most_parts));
    int in_part = (SLOTS2 + wanted - 1) / wanted, count = (SLOTS2 + in_part - 1) / in_part;
    u32 in_block = (static_cast<u32>(tiles) * count * GROUPS2 + gridDim.x - 1) / gridDim.x;
    // In units of 512 bytes: a slot's stage 36, a row's sums written and read 8, and as much again to begin a task.
    u32 cost = (in_block + TEAMS - 1) / TEAMS * (36 * in_part + 8 * (rows / max(tiles, 1) + 1));
    int best = __reduce_min_sync(~0u, min(cost, 1u << 26) * 32 + lane) % 32;
    in_part = __shfl_sync(~0u, in_part, best), count = __shfl_sync(~0u, count, best);
    if (lane > 0) return;
    part_slots = in_part, parts = count;
    window = ACTIVATIONS_ELEMENTS / (TOKEN_TILE * (part_slots * Slot<W2>::K + 8));
    fours = part_slots * Slot<W2>::K / 4;
    u32 units = tiles * STRIPS;  // many pieces each where they are few
    log_lanes = units * 4 <= gridDim.x ? 3 : units <= gridDim.x ? 1 : 0;
    tasks.cut(tiles * parts * GROUPS2, gridDim.x);
    by_parts.set(parts), by_window.set(window), by_fours.set(fours);
  }
};

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
    segment = q / GROUPS2, tile = work.by_parts.quotient(segment), part = segment - tile * work.parts;
    block = q % GROUPS2 * STAGE_BLOCKS, blocks = min(STAGE_BLOCKS, BLOCKS2 - block);
    begin = part * work.part_slots, end = min(begin + work.part_slots, SLOTS2);
  }
};
