// A whole MoE layer in one cooperative launch, for every format: route, GEMM 1 and activation, GEMM 2, sum over slots.
// The phases are parted by the driver's own grid barrier; nothing in the scratch is expected to survive a call.
//
// The constants in capitals come from the build (kernels/plan/cuda_moe.py):
//   FP16, W13_BITS, W13_GROUP, W13_SYMMETRIC, W13_SORTED, W2_BITS, W2_GROUP, W2_SYMMETRIC, GATED, TOKEN_TILE
#include <cooperative_groups.h>

#include "epilogue.cuh"
#include "reduce.cuh"
#include "route.cuh"

typedef SixteenBits<FP16>::Type Type;
typedef Type::Scalar Scalar;
typedef Format<W13_BITS, W13_GROUP, W13_SYMMETRIC> W13;
typedef Format<W2_BITS, W2_GROUP, W2_SYMMETRIC> W2;

struct Tile {  // the tile's rows: which token, which slot, which router weight; -1 beyond the last
  int tokens[TOKEN_TILE], slots[TOKEN_TILE];
  float weights[TOKEN_TILE];
};

__device__ __forceinline__ void describe_tile(const MoEArgs& args, int tile, int flags, bool weighted, Tile& rows) {
  __syncthreads();  // the last tile's epilogue reads the same memory
  if (threadIdx.x < TOKEN_TILE) {
    bool there = threadIdx.x < args.tile_rows[tile];
    int slot = there ? args.sorted_slots[args.tile_row[tile] + threadIdx.x] : -1;
    rows.slots[threadIdx.x] = slot;
    rows.tokens[threadIdx.x] = there ? slot / args.top_k : -1;
    rows.weights[threadIdx.x] = there && weighted ? router_weight<Type>(args, flags, slot) : 1.0f;
  }
  __syncthreads();
}

// Inputs k .. k + 255 of rows `row_of(r)` (null where there is none) into a buffer, zeros where there is nothing.
template <class RowOf>
__device__ __forceinline__ void copy_rows(Scalar* buffer, int k, int size_k, RowOf row_of) {
  constexpr int VECTORS = CHUNK_K / 8;
  for (int i = threadIdx.x; i < TOKEN_TILE * VECTORS; i += THREADS) {
    int r = i / VECTORS, element = i % VECTORS * 8;
    const Scalar* row = row_of(r);
    bool there = row && k + element < size_k;
    copy_async(buffer + r * ROW_ELEMENTS + element, there ? row + k + element : static_cast<const Scalar*>(nullptr), there);
  }
}

// The same with the inputs in the order that w13's act-order asks for.
template <class RowOf>
__device__ __forceinline__ void gather_rows(Scalar* buffer, int k, int size_k, const int* order, RowOf row_of) {
  for (int i = threadIdx.x; i < TOKEN_TILE * CHUNK_K; i += THREADS) {
    int r = i / CHUNK_K, element = i % CHUNK_K;
    const Scalar* row = row_of(r);
    bool there = row && k + element < size_k;
    buffer[r * ROW_ELEMENTS + element] = there ? row[order[k + element]] : Type::from_float(0.0f);
  }
}

// The tile's sums where every thread can read them, in the memory of the token buffers.
__device__ __forceinline__ TileSums<TOKEN_TILE>& gather_sums(const Sums<TOKEN_TILE>& sums, Scalar* shared, int block, int part) {
  TileSums<TOKEN_TILE>& tile = *reinterpret_cast<TileSums<TOKEN_TILE>*>(shared);
  __syncthreads();  // parts were exchanged there
  if (part == 0) tile.put(sums, block);
  __syncthreads();
  return tile;
}

constexpr int FIRST_STEP = GATED ? 64 : 128;  // activation columns of a tile

struct Work {  // items are (tile, step over columns), tiles fastest, so that an expert's tiles share its weights in L2
  int tiles, splits;
  u64 items;
  __device__ __forceinline__ Work(const MoEArgs& args, int columns, int step, int size_k, u64 capacity, int most) {
    tiles = *args.tile_count;
    items = static_cast<u64>(tiles) * ((columns + step - 1) / step);
    splits = split_count(items, size_k, capacity, most);
  }
};

__device__ __forceinline__ Work first_work(const MoEArgs& args) {
  return Work(args, args.intermediate_size, FIRST_STEP, args.hidden_size, args.split_capacity, 1 << 20);
}

__device__ __forceinline__ Work second_work(const MoEArgs& args) {
  return Work(args, args.hidden_size, 128, args.intermediate_size, ~0ull, args.most_slot_splits);
}

__device__ __forceinline__ float* split_sums(const MoEArgs& args, u64 unit) {
  return args.split_sums + unit * TOKEN_TILE * 128;
}

__device__ void first_gemm(const MoEArgs& args, int flags, Scalar* shared, Tile& rows, const Work& work) {
  int warp = threadIdx.x >> 5, block = warp / WARPS_K, part = warp % WARPS_K;
  for (u64 unit = blockIdx.x; unit < work.items * work.splits; unit += gridDim.x) {
    u64 item = unit % work.items;
    int tile = item % work.tiles, start = static_cast<int>(item / work.tiles) * FIRST_STEP;
    int expert = args.tile_expert[tile];
    describe_tile(args, tile, flags, flags & WEIGHT_ON_INPUT, rows);
    int column = start + (GATED ? block * args.intermediate_size : 64 * block);
    if (!GATED && column >= args.intermediate_size) column = -1;
    auto row_of = [&](int r) {
      return rows.tokens[r] < 0 ? nullptr : static_cast<const Scalar*>(args.x) + rows.tokens[r] * args.x_stride;
    };
    Inputs inputs(args.hidden_size, static_cast<int>(unit / work.items), work.splits);
    Sums<TOKEN_TILE> sums;
    multiply_tile<Type, W13, TOKEN_TILE>(
        sums, args.w13, expert, column, args.hidden_size, args.intermediate_size * (GATED ? 2 : 1), inputs, shared,
        [&](Scalar* buffer, int k) {
          if (W13_SORTED)
            gather_rows(buffer, k, args.hidden_size, args.w13.sort_order + static_cast<u64>(expert) * args.hidden_size, row_of);
          else
            copy_rows(buffer, k, args.hidden_size, row_of);
        });
    TileSums<TOKEN_TILE>& tile_sums = gather_sums(sums, shared, block, part);
    if (work.splits > 1)
      store_split<TOKEN_TILE>(split_sums(args, unit), tile_sums, args.tile_rows[tile]);
    else
      store_activations<Type, W13, GATED>(
          args, [&](int c, int token) { return tile_sums.sums[c][token]; }, expert, start, args.tile_row[tile],
          args.tile_rows[tile], rows.weights);
  }
}

// Where K was split: the splits' sums added in their order, then the activation.
__device__ void add_splits(const MoEArgs& args, int flags, Tile& rows, const Work& work) {
  for (u64 item = blockIdx.x; item < work.items; item += gridDim.x) {
    int tile = item % work.tiles, start = static_cast<int>(item / work.tiles) * FIRST_STEP;
    describe_tile(args, tile, flags, flags & WEIGHT_ON_INPUT, rows);
    auto sum_of = [&](int c, int token) {
      float sum = 0.0f;
      for (int s = 0; s < work.splits; s++) sum += split_sums(args, s * work.items + item)[token * 128 + c];
      return sum;
    };
    store_activations<Type, W13, GATED>(args, sum_of, args.tile_expert[tile], start, args.tile_row[tile],
                                        args.tile_rows[tile], rows.weights);
  }
}

__device__ void second_gemm(const MoEArgs& args, int flags, Scalar* shared, Tile& rows, const Work& work) {
  int warp = threadIdx.x >> 5, block = warp / WARPS_K, part = warp % WARPS_K;
  for (u64 unit = blockIdx.x; unit < work.items * work.splits; unit += gridDim.x) {
    u64 item = unit % work.items;
    int split = static_cast<int>(unit / work.items), tile = item % work.tiles;
    int start = static_cast<int>(item / work.tiles) * 128, column = start + 64 * block;
    if (column >= args.hidden_size) column = -1;
    int expert = args.tile_expert[tile], row = args.tile_row[tile], count = args.tile_rows[tile];
    describe_tile(args, tile, flags, !(flags & WEIGHT_ON_INPUT), rows);
    auto row_of = [&](int r) {
      return r >= count ? nullptr
                        : static_cast<const Scalar*>(args.activations) + static_cast<u64>(row + r) * args.intermediate_size;
    };
    Sums<TOKEN_TILE> sums;
    multiply_tile<Type, W2, TOKEN_TILE>(
        sums, args.w2, expert, column, args.intermediate_size, args.hidden_size,
        Inputs(args.intermediate_size, split, work.splits), shared,
        [&](Scalar* buffer, int k) { copy_rows(buffer, k, args.intermediate_size, row_of); });
    store_slots<Type, W2, TOKEN_TILE>(args, gather_sums(sums, shared, block, part), expert, start, count, rows.slots,
                                      rows.weights, flags & SLOTS_FP32, split);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, TOKEN_TILE == 8 ? 2 : 1) moe(const __grid_constant__ MoEArgs args, int flags) {
  extern __shared__ uint4 dynamic[];
  __shared__ Tile rows;
  __shared__ int partial[32];
  auto grid = cooperative_groups::this_grid();
  Scalar* shared = reinterpret_cast<Scalar*>(dynamic);
  if (blockIdx.x == 0) route<TOKEN_TILE>(args, flags & IDS64, reinterpret_cast<int*>(dynamic), partial);
  grid.sync();
  Work first = first_work(args), second = second_work(args);
  first_gemm(args, flags, shared, rows, first);
  grid.sync();
  if (first.splits > 1) {  // the same for all blocks
    add_splits(args, flags, rows, first);
    grid.sync();
  }
  second_gemm(args, flags, shared, rows, second);
  grid.sync();
  if (flags & SLOTS_FP32)
    reduce<Type, float>(args, second.splits);
  else
    reduce<Type, Scalar>(args, second.splits);
}
