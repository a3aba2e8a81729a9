// The ends of a prefill call: slots -> rows sorted by expert, cut into token tiles; one row per slot -> one per token.
//
// The constant from the build (kernels/plan/prefill.py): FP16
#include <cooperative_groups.h>

#include "number.cuh"
#include "prefill_ring.cuh"

template <bool YES, class A, class B>
struct Choose { typedef A type; };
template <class A, class B>
struct Choose<false, A, B> { typedef B type; };

typedef Choose<FP16, Fp16, Bf16>::type Type;
typedef Type::Scalar Scalar;

constexpr int BLOCKS = 8, THREADS = 1024, MOST_EXPERTS = 1024;

// Some of a thread's slots, THREADS apart: read at once, not one after the other with writes and atomics in between.
struct OwnSlots {
  static constexpr int COUNT = 4;
  int experts[COUNT];  // -1: of another rank, or past the end
  float weights[COUNT];

  template <class V>
  static __device__ __forceinline__ void load(V (&values)[COUNT], const void* from, int first, int end, V missing) {
#pragma unroll
    for (int i = 0; i < COUNT; i++)
      values[i] = first + i * THREADS < end ? static_cast<const V*>(from)[first + i * THREADS] : missing;
  }

  template <class Id>
  __device__ __forceinline__ void read_ids(const PrefillArgs& args, int first, int end) {
    Id ids[COUNT];
    load<Id>(ids, args.topk_ids, first, end, -1);
#pragma unroll
    for (int i = 0; i < COUNT; i++) experts[i] = ids[i] >= 0 && ids[i] < args.num_global_experts ? static_cast<int>(ids[i]) : -1;
  }

  __device__ __forceinline__ void read(const PrefillArgs& args, int first, int end) {
    if (args.flags & WEIGHTS_FP32) {
      load<float>(weights, args.topk_weights, first, end, 0.0f);
    } else {
      Scalar given[COUNT];
      load<Scalar>(given, args.topk_weights, first, end, Type::from_float(0.0f));
#pragma unroll
      for (int i = 0; i < COUNT; i++) weights[i] = Type::to_float(given[i]);
    }
    if (args.flags & IDS64)
      read_ids<long long>(args, first, end);
    else
      read_ids<int>(args, first, end);
    if (args.expert_map) {
#pragma unroll
      for (int i = 0; i < COUNT; i++) experts[i] = experts[i] < 0 ? -1 : args.expert_map[experts[i]];
    }
#pragma unroll
    for (int i = 0; i < COUNT; i++) experts[i] = experts[i] < args.num_experts ? experts[i] : -1;
  }
};

// Sums of both numbers over the threads before this one.
__device__ __forceinline__ int2 block_prefix(int2 v, int2* partial) {
  int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  int2 sum = v;
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    int x = __shfl_up_sync(~0u, sum.x, d), y = __shfl_up_sync(~0u, sum.y, d);
    if (lane >= d) sum.x += x, sum.y += y;
  }
  if (lane == 31) partial[warp] = sum;
  __syncthreads();
  for (int w = 0; w < warp; w++) sum.x += partial[w].x, sum.y += partial[w].y;
  return make_int2(sum.x - v.x, sum.y - v.y);
}

__device__ __forceinline__ int width_of(const PrefillArgs& args, int rows) {
  int octets = (rows + 7) / 8;
  while (!(args.widths >> octets & 1)) octets++;
  return 8 * octets;
}

// The expert's rows in as few tiles as possible, all of about the same size.
__device__ __forceinline__ void write_tiles(const PrefillArgs& args, int expert, int row, int rows, int first, int count) {
  int share = (rows + count - 1) / count, last = rows - (count - 1) * share;
  int4 what = make_int4(expert, row, rows, share);
  int4 where = make_int4(first, count, width_of(args, share), width_of(args, last));
  for (int t = first; t < first + count; t++) {
    int4* tile = reinterpret_cast<int4*>(args.token_tiles + t);
    tile[0] = what, tile[1] = where;
  }
}

// One cluster. Every block counts its share of the slots by expert; an expert's rows are those of block 0, 1, ... in
// turn. Where a row stands among the others of its expert and block changes from run to run and nothing depends on it:
// every row is computed alone and lands by its slot.
extern "C" __global__ void __cluster_dims__(BLOCKS) __launch_bounds__(THREADS, 1)
    prefill_route(const __grid_constant__ PrefillArgs args) {
  namespace cg = cooperative_groups;
  __shared__ int counts[MOST_EXPERTS];
  __shared__ int2 partial[32];
  cg::cluster_group cluster = cg::this_cluster();
  int rank = cluster.block_rank(), slots = args.tokens * args.top_k, share = (slots + BLOCKS - 1) / BLOCKS;
  int begin = min(slots, rank * share), end = min(slots, begin + share), thread = threadIdx.x;
  constexpr int AT_ONCE = OwnSlots::COUNT * THREADS;
  counts[thread] = 0;
  OwnSlots own;
  __syncthreads();
  for (int start = begin + thread; start < end; start += AT_ONCE) {
    own.read(args, start, end);
#pragma unroll
    for (int i = 0; i < OwnSlots::COUNT; i++) {
      int slot = start + i * THREADS;
      if (slot < end) args.slot_is_here[slot] = own.experts[i] >= 0;
      if (own.experts[i] >= 0) atomicAdd(&counts[own.experts[i]], 1);
    }
  }
  cluster.sync();

  int rows = 0, before = 0;
#pragma unroll
  for (int r = 0; r < BLOCKS; r++) {
    int there = cluster.map_shared_rank(counts, r)[thread];
    rows += there;
    if (r < rank) before += there;
  }
  int tiles = (rows + args.token_tile - 1) / args.token_tile;
  int2 first = block_prefix(make_int2(rows, tiles), partial);
  if (thread % BLOCKS == rank && rows) write_tiles(args, thread, first.x, rows, first.y, tiles);
  if (rank == 0 && thread == THREADS - 1) *args.counters = {first.y + tiles, {0, 0}};
  cluster.sync();  // the counts have been read
  counts[thread] = first.x + before;
  __syncthreads();

  for (int start = begin + thread; start < end; start += AT_ONCE) {
    if (share > AT_ONCE) own.read(args, start, end);  // else they are in registers
#pragma unroll
    for (int i = 0; i < OwnSlots::COUNT; i++) {
      if (own.experts[i] < 0) continue;
      int row = atomicAdd(&counts[own.experts[i]], 1);
      reinterpret_cast<int2*>(args.routed_rows)[row] = make_int2(start + i * THREADS, __float_as_int(own.weights[i]));
    }
  }
}

// Eight columns of a token: its slots that reach an expert of this rank, added in their order. They go through shared
// memory, each thread's own part of it, since copies to it are all under way at once, zeros for missing slots among them;
// of loads to registers the assembler keeps three under way, or waits for each slot's flag before the next.
extern "C" __global__ void __launch_bounds__(256) prefill_sum(const __grid_constant__ PrefillArgs args) {
  constexpr int AT_ONCE = 8;
  __shared__ uint4 parts[AT_ONCE][256];
  int columns8 = args.hidden_size / 8;
  u64 item = static_cast<u64>(blockIdx.x) * 256 + threadIdx.x;
  if (item >= static_cast<u64>(args.tokens) * columns8) return;
  int token = item / columns8, column = item % columns8 * 8;
  int first = token * args.top_k;
  const Scalar* from = static_cast<const Scalar*>(args.w2_output) + column;
  float total[8] = {};
  for (int k = 0; k < args.top_k; k += AT_ONCE) {
    int here[AT_ONCE];
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) here[i] = k + i < args.top_k ? args.slot_is_here[first + k + i] : 0;
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++)
      copy_async(&parts[i][threadIdx.x], from + static_cast<u64>(here[i] ? first + k + i : first) * args.hidden_size, here[i] != 0);
    commit_copies();
    wait_for_copies();
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) {
      uint4 bits = load_shared<uint4>(shared_address(&parts[i][threadIdx.x]));
      const Scalar* part = reinterpret_cast<const Scalar*>(&bits);
#pragma unroll
      for (int c = 0; c < 8; c++) total[c] += Type::to_float(part[c]);
    }
  }
  Scalar* out = static_cast<Scalar*>(args.out) + token * args.out_stride + column;
  Scalar done[8];
#pragma unroll
  for (int c = 0; c < 8; c++) done[c] = Type::from_float(total[c] * args.routed_scaling_factor);
  if (args.flags & OUT_ALIGNED) {
    *reinterpret_cast<uint4*>(out) = *reinterpret_cast<uint4*>(done);
  } else {
#pragma unroll
    for (int c = 0; c < 8; c++) out[c] = done[c];
  }
}
