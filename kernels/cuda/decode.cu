// A whole MoE layer for few tokens, in one cooperative launch of one block per multiprocessor: every block routes for
// itself, GEMM 1, grid barrier, activation and GEMM 2, grid barrier, sum over slots. Producer warps stream the weights
// through rings that run ahead over all of it, so memory does not wait at the barriers.
// The constants that the build gives are listed in decode_shape.cuh.
#include <cooperative_groups.h>

#include "decode_producer.cuh"
#include "decode_tokens.cuh"
#include "decode_total.cuh"

struct Block {  // what all of it needs
  const MoEArgs& args;
  int flags, team, n;  // n: the warp's column block in a stage
  char* shared;
  const Routes& routes;
  const Work& work;
  Ring& ring;

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

// `chunk` is the block's first.
__device__ __forceinline__ void first_gemm(Block& block, TokenChunk chunk) {
  const Work& work = block.work;
  u32 at = work.granules.start(blockIdx.x), end = work.granules.start(blockIdx.x + 1);
  for (int buffer = 0; at < end;) {
    Piece piece(at, end);
    RowTile tile = block.routes.tiles[piece.tile];
    int column_block = strip_block(piece.strip, block.n);
    u64 row = static_cast<u64>(blockIdx.x - work.granules.owner(piece.unit * SLOTS1)) * work.rows + tile.row;
    float* to = block.args.split_sums + row * SIZE_N1 + column_block * 64;
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

// Lists the rows of the window that begins with task `at`; the block's consumers call it, after a barrier of theirs.
__device__ __forceinline__ void list_window(const Block& block, Window& window, u32 at) {
  int first = at / GROUPS2, count = (block.work.window_end(at) - 1) / GROUPS2 - first + 1, lane = threadIdx.x & 31;
  if (threadIdx.x < 32) {
    int listed = 0;
#pragma unroll 1
    for (int s = 0; s < count; s++) {
      int rows = block.routes.tiles[block.work.by_parts.quotient(first + s)].rows;
      if (lane < rows) window.segment[listed + lane] = s, window.row[listed + lane] = lane;
      listed += rows;
    }
    if (lane == 0) {
      int items = listed * block.work.fours, log_lanes = block.work.log_lanes;
      while (log_lanes > 0 && items << log_lanes > THREADS) log_lanes--;
      window.row_count = listed, window.items = items, window.log_lanes = log_lanes;
    }
  }
  sync_consumers();
}

// A thread's first activation of the first window, found before GEMM 1, while its weights are on their way.
__device__ __forceinline__ Item first_item(const Block& block, Window& window) {
  const Work& work = block.work;
  u32 at = work.tasks.start(blockIdx.x);
  Item item;
  item.pieces = 0;
  if (at == work.tasks.start(blockIdx.x + 1)) return item;
  list_window(block, window, at);
  item.find(block.args, work, block.routes, window, at / GROUPS2, threadIdx.x);
  return item;
}

// The activations of a window that begins with task `at`; `item` is the thread's first.
__device__ __forceinline__ void activate_window(const Block& block, const Window& window, u32 at, Item item) {
  const Work& work = block.work;
  int lanes = 1 << window.log_lanes, all = window.items * lanes;
#pragma unroll 1
  for (int index = threadIdx.x;;) {
    activate_item(block.args, work, block.routes, item, lanes, block.activations(), block.flags & WEIGHT_ON_INPUT);
    index += THREADS;
    if (index - static_cast<int>(threadIdx.x & 31) >= all) break;
    item.find(block.args, work, block.routes, window, at / GROUPS2, index);
  }
  sync_consumers();
}

__device__ __forceinline__ void second_gemm(Block& block, Window& window, Item item) {
  const Work& work = block.work;
  u32 begin = work.tasks.start(blockIdx.x), at = begin, end = work.tasks.start(blockIdx.x + 1);
  int row_elements = work.part_slots * Slot<W2>::K + 8;
  while (at < end) {
    u32 behind = work.window_end(at), first = at / GROUPS2;
    if (at > begin) {
      sync_consumers();  // the window before is in use until here
      list_window(block, window, at);
      item.find(block.args, work, block.routes, window, first, threadIdx.x);
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
    }
    at = behind;
  }
}

extern "C" __global__ void __launch_bounds__(THREADS + 32 * TEAMS, 1) decode(const __grid_constant__ MoEArgs args, int flags) {
  extern __shared__ __align__(128) uint4 dynamic[];  // bulk copies to places of 16 bytes take a quarter longer
  __shared__ u64 full[TEAMS * RING_STAGES], empty[TEAMS * RING_STAGES], planned;
  __shared__ int partial[32];
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
  wait_for_kernel_before();
  RouteCounts counts;
  if (slots > 32)
    counts = route_many(args, flags, routes, reinterpret_cast<u16*>(shared + AT_TOKENS), partial);
  else if (warp == 0)
    counts = route_few(args, flags, routes);
  if (threadIdx.x == 0) work.plan_first(counts);
  __syncthreads();
  auto grid = cooperative_groups::this_grid();
  int team = warp < WARPS ? warp / STAGE_BLOCKS : warp - WARPS;
  Ring ring{shared + team * RING_STAGES * STAGE_BYTES, full + team * RING_STAGES, empty + team * RING_STAGES, 0};
  if (warp >= WARPS) {
    produce_first(args, work, routes.tiles, ring, team);
    wait_for(&planned, 0);
    if (work.granules.step <= HELD_BACK_SLOTS << Ranges::POINT) ring.wait_arrived();
    produce_second(args, work, routes.tiles, ring, team, 0, RING_STAGES);
    grid.sync();
    produce_second(args, work, routes.tiles, ring, team, RING_STAGES, 1 << 30);
    grid.sync();
    return;
  }
  Block block{args, flags, team, warp % STAGE_BLOCKS, shared, routes, work, ring};
  TokenChunk chunk;
  if (work.granules.start(blockIdx.x) < work.granules.start(blockIdx.x + 1)) chunk.fetch(args, routes, work.granules.start(blockIdx.x));
  if (warp == 0) {
    work.plan_second(args.most_slot_splits);
    if (threadIdx.x == 0) arrive(&planned);
  }
  sync_consumers();
  Item item = first_item(block, window);
  first_gemm(block, chunk);
  grid.sync();
  second_gemm(block, window, item);
  grid.sync();
  add_slots(args, work, routes, flags);
}
