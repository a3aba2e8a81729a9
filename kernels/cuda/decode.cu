// A whole MoE layer for few tokens, in one cooperative launch of one block per multiprocessor: every block routes for
// itself, GEMM 1, grid barrier, activation and GEMM 2; whoever stores a token's last rows sums them. Producer warps
// stream the weights through rings that run ahead over all of it, so memory does not wait at the barrier.
// The constants that the build gives are listed in decode_shape.cuh.
#include <cooperative_groups.h>

#include "decode_producer.cuh"
#include "decode_tokens.cuh"
#include "decode_total.cuh"

struct Block {  // what all of it needs
  const MoEArgs& args;
  int team, n;  // n: the warp's column block in a stage
  char* shared;
  const Routes& routes;
  const Work& work;
  Ring& ring;
  Totals totals;

  __device__ __forceinline__ Scalar* tokens(int buffer) const { return reinterpret_cast<Scalar*>(shared + AT_TOKENS) + buffer * CHUNK_ELEMENTS; }
  // sums += the ring's next stage * tokens, if the warp has columns in it; the stage is free when its words are read.
  template <class F>
  __device__ __forceinline__ void multiply(WarpSums<OCTETS>& sums, bool has_columns, const Scalar* tokens, int row_elements, int rows) const {
    SlotWords<Type, F> words;
    const char* stage = ring.wait_full();
    if (has_columns) words.read(stage, n);
    ring.release();
    if (has_columns) multiply_rows(sums, words, tokens, row_elements, rows);
  }
  __device__ __forceinline__ Scalar* activations() const { return reinterpret_cast<Scalar*>(shared + AT_ACTIVATIONS); }
};

__device__ __forceinline__ void first_gemm(Block& block) {
  const Work& work = block.work;
  u32 at = work.granules.start(blockIdx.x), end = work.granules.start(blockIdx.x + 1);
  TokenChunk chunk;
  if (at < end) chunk.fetch(block.args, block.routes, at);
  for (int buffer = 0; at < end;) {
    Piece piece(at, end);
    RowTile tile = block.routes.tiles[piece.tile];
    int column_block = strip_block(piece.strip, block.n);
    u64 row = static_cast<u64>(blockIdx.x - work.granules.owner(piece.unit * SLOTS1)) * work.rows + tile.row;
    float* to = block.totals.first_sums() + row * SIZE_N1 + column_block * 64;
    WarpSums<OCTETS> sums;
    sums.clear();
    int slot = piece.begin + block.team;
    for (int begin = piece.begin; begin < piece.end; begin += CHUNK_SLOTS, buffer ^= 1) {
      int stop = min(begin + CHUNK_SLOTS, piece.end);
      chunk.put(block.tokens(buffer));
      sync_consumers();
      at += stop - begin;
      if (at < end) chunk.fetch(block.args, block.routes, at);
      for (; slot < stop; slot += TEAMS)
        block.multiply<W13>(sums, column_block >= 0, block.tokens(buffer) + (slot - begin) * Slot<W13>::K, CHUNK_ROW, tile.rows);
    }
    add_teams(sums, reinterpret_cast<float4*>(block.activations()), block.team, block.n, tile.rows);
    if (block.team == 0 && column_block >= 0) store_sums(to, sums, tile.rows, SIZE_N1);
  }
}

// A thread's first activation, where the block has a task of GEMM 2.
__device__ __forceinline__ Item first_item(const Block& block, const Window& window) {
  const Work& work = block.work;
  u32 at = work.tasks.start(blockIdx.x);
  Item item;
  item.pieces = 0;
  if (at < work.tasks.start(blockIdx.x + 1)) item.find(block.totals.first_sums(), work, block.routes, window, at / GROUPS2, threadIdx.x);
  return item;
}

// The activations of a window that begins with task `at`; `item` is the thread's first.
__device__ __forceinline__ void activate_window(const Block& block, const Window& window, u32 at, Item item) {
  const Work& work = block.work;
  int lanes = 1 << window.log_lanes, all = window.items * lanes;
#pragma unroll 1
  for (int index = threadIdx.x;;) {
    activate_item(block.args, work, block.routes, item, lanes, block.activations(), block.totals.flags & WEIGHT_ON_INPUT);
    index += THREADS;
    if (index - static_cast<int>(threadIdx.x & 31) >= all) break;
    item.find(block.totals.first_sums(), work, block.routes, window, at / GROUPS2, index);
  }
  sync_consumers();
}

// Counts a task's rows, which the team has just stored, and adds up the tokens of which they were the last.
__device__ __forceinline__ void finish_task(const Block& block, const Task& task, RowTile tile, u32* last_rows) {
  sync_threads_of<TEAM_THREADS>(2 + block.team);
  if (block.n == 0) {
    u32 rows = block.totals.count(tile, task.block / STAGE_BLOCKS);
    if ((threadIdx.x & 31) == 0) last_rows[block.team] = rows;
  }
  sync_threads_of<TEAM_THREADS>(2 + block.team);
#pragma unroll 1
  for (u32 rows = last_rows[block.team]; rows; rows &= rows - 1)
    block.totals.add(block.routes.slot_of_row[tile.row + __ffs(rows) - 1] / block.args.top_k, task.block * 64, task.blocks * 64);
}

__device__ __forceinline__ void second_gemm(Block& block, Window& window, Item item, u32* last_rows) {
  const Work& work = block.work;
  u32 begin = work.tasks.start(blockIdx.x), at = begin, end = work.tasks.start(blockIdx.x + 1);
  int row_elements = work.fours * 4 + 8;
  while (at < end) {
    u32 behind = work.window_end(at), first = at / GROUPS2;
    if (at > begin) {
      sync_consumers();  // the window before is in use until here
      if (threadIdx.x < 32) window.list(work, block.routes, at);
      sync_consumers();
      item.find(block.totals.first_sums(), work, block.routes, window, first, threadIdx.x);
    }
    activate_window(block, window, at, item);
    for (u32 q = at + block.team; q < behind; q += TEAMS) {
      Task task(work, q);
      RowTile tile = block.routes.tiles[task.tile];
      const Scalar* tokens = block.activations() + (task.segment - first) * TOKEN_TILE * row_elements;
      WarpSums<OCTETS> sums;
      sums.clear();
      for (int slot = task.begin; slot < task.end; slot++, tokens += Slot<W2>::K)
        block.multiply<W2>(sums, block.n < task.blocks, tokens, row_elements, tile.rows);
      u64 row = static_cast<u64>(task.part) * work.rows + tile.row;
      if (block.n < task.blocks)
        store_sums(static_cast<float*>(block.args.w2_output) + row * HIDDEN + (task.block + block.n) * 64, sums, tile.rows, HIDDEN);
      finish_task(block, task, tile, last_rows);
    }
    at = behind;
  }
}

extern "C" __global__ void __launch_bounds__(ALL_THREADS, 1) decode(const __grid_constant__ MoEArgs args, int flags) {
  extern __shared__ uint4 dynamic[];
  __shared__ u64 full[TEAMS * RING_STAGES], empty[TEAMS * RING_STAGES], planned;
  __shared__ int partial[32];
  __shared__ u32 last_rows[TEAMS];
  __shared__ Work work;
  __shared__ Window window;
  char* shared = reinterpret_cast<char*>(dynamic);
  int warp = __shfl_sync(~0u, threadIdx.x >> 5, 0), slots = args.tokens * args.top_k;
  Routes routes(shared + AT_LISTS, slots);
  if (warp == WARPS) {
    for (int i = threadIdx.x & 31; i < TEAMS * RING_STAGES; i += 32) init_barrier(full + i, FULL_ARRIVALS), init_barrier(empty + i, STAGE_BLOCKS);
    if (threadIdx.x % 32 == 0) init_barrier(&planned, 1);
    publish_barriers();
  }
  RouteCounts counts;
  if (slots > 32)
    counts = route_many(args, flags, routes, reinterpret_cast<u16*>(shared + AT_TOKENS), partial);
  else if (warp == 0)
    counts = route_few(args, flags, routes);
  if (threadIdx.x == 0) work.plan_first(counts);
  __syncthreads();
  auto grid = cooperative_groups::this_grid();
  if (warp == PLANNER) {
    work.plan_second(args.most_slot_splits);
    __syncwarp();
    u32 at = work.tasks.start(blockIdx.x);
    if (at < work.tasks.start(blockIdx.x + 1)) window.list(work, routes, at);
    __syncwarp();
    if (threadIdx.x % 32 == 0) arrive(&planned);
    grid.sync();
    return;
  }
  int team = warp < WARPS ? warp / STAGE_BLOCKS : warp - WARPS;
  Ring ring{shared + team * RING_STAGES * STAGE_BYTES, full + team * RING_STAGES, empty + team * RING_STAGES, 0};
  if (warp >= WARPS) {
    produce_first(args, work, routes.tiles, ring, team);
    wait_for(&planned, 0);
    if (work.granules.step <= HELD_BACK_SLOTS << Ranges::POINT) ring.wait_arrived();
    produce_second(args, work, routes.tiles, ring, team, 0, RING_STAGES);
    grid.sync();
    produce_second(args, work, routes.tiles, ring, team, RING_STAGES, 1 << 30);
    return;
  }
  Block block{args, team, warp % STAGE_BLOCKS, shared, routes, work, ring, {args, work, routes, flags}};
  first_gemm(block);
  block.totals.clear();
  auto arrival = grid.barrier_arrive();
  wait_for(&planned, 0);
  Item item = first_item(block, window);
  grid.barrier_wait(static_cast<decltype(arrival)&&>(arrival));
  second_gemm(block, window, item, last_rows);
  block.totals.zeros();
}
