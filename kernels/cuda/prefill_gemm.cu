// One GEMM of an MoE layer on Hopper: rows sorted by expert times the expert's Marlin words, by wgmma.
//
//   GEMM 1: tokens, gathered -> activations: 128 of them a tile, from as many gate and up columns (256 where ungated)
//   GEMM 2: activations -> rows by slot, times their router weights: 256 columns a tile
//
// A block is a producer warpgroup (prefill_load.cuh) and two that multiply (prefill_multiply.cuh); the grid fills the
// device and takes work items until none is left. Each is a tile of columns and all of K, so the order in which they
// are taken changes no bit of the result.
//
// The constants in capitals come from the build (kernels/plan/prefill.py):
//   FP16, BITS, GROUP, SYMMETRIC, SECOND, GATED, TOKEN_TILE, WIDTHS, STEPS, STAGES, SMEM_BYTES, BLOCKS_PER_SM
#include "prefill_epilogue.cuh"
#include "prefill_load.cuh"

typedef SixteenBits<FP16>::Type Type;
typedef Type::Scalar Scalar;
typedef Format<BITS, GROUP, SYMMETRIC> F;
typedef Layout<F, TOKEN_TILE, STAGES> L;
static_assert(L::BYTES == SMEM_BYTES, "as kernels/plan/prefill.py has it");

constexpr bool PAIRED = GATED && !SECOND;
constexpr int THREADS = 384, PRODUCER_REGISTERS = BLOCKS_PER_SM == 1 ? 40 : 32, REGISTERS = BLOCKS_PER_SM == 1 ? 232 : 104;
typedef Multiplier<Type, F, L, STAGES, STEPS> Multiply;

__device__ __forceinline__ const MatrixArgs& matrix_of(const PrefillArgs& args) { return SECOND ? args.w2 : args.w13; }
__device__ __forceinline__ int size_k_of(const PrefillArgs& args) { return SECOND ? args.intermediate_size : args.hidden_size; }
__device__ __forceinline__ int size_n_of(const PrefillArgs& args) {
  return SECOND ? args.hidden_size : args.intermediate_size * (GATED ? 2 : 1);
}
__device__ __forceinline__ int column_tiles_of(const PrefillArgs& args) {
  constexpr int COLUMNS = PAIRED ? HALF_COLUMNS : 2 * HALF_COLUMNS;
  return ((PAIRED ? args.intermediate_size : size_n_of(args)) + COLUMNS - 1) / COLUMNS;
}

// GEMM 2: (sum + bias) * router weight by slot. GEMM 1 without gate: the activation by row.
template <int T>
__device__ __forceinline__ void store_plain(const Sums<T>& sums, const PrefillArgs& args, const WorkItem& item, const Warp& warp,
                                            const Rows& rows, u32 buffer) {
  int start = item.column_tile * 256 + warp.half * 128 + warp.block * 64 + warp.pair * 32, m = warp.lane & 3;
  Finish<Type, F> finish(matrix_of(args), item.expert, start, size_n_of(args), warp.lane >> 2);
  bool on_input = args.flags & WEIGHT_ON_INPUT;
  if (start >= size_n_of(args)) return;
  float factor = SECOND && args.flags & DIRECT ? args.routed_scaling_factor : 1.0f;
  auto value = [&](int i) {
    Octet octet = octet_of(sums, i);
    float2 weights = on_input || SECOND ? rows.weights(i, m) : make_float2(1.0f, 1.0f);
    if (SECOND) {
      finish.apply(octet, make_float2(1.0f, 1.0f));
      float first = on_input ? factor : factor * weights.x, second = on_input ? factor : factor * weights.y;
#pragma unroll
      for (int c = 0; c < 4; c++) octet.v[c >> 1][c & 1][0] *= first, octet.v[c >> 1][c & 1][1] *= second;
    } else {
      finish.apply(octet, weights);
#pragma unroll
      for (int c = 0; c < 8; c++) (&octet.v[0][0][0])[c] = activate_alone((&octet.v[0][0][0])[c], args.activation);
    }
    return octet;
  };
  Scalar* out = static_cast<Scalar*>(SECOND ? args.flags & DIRECT ? args.out : args.w2_output : args.activations) + start;
  long long stride = SECOND ? args.flags & DIRECT ? args.out_stride : args.hidden_size : args.intermediate_size;
  store_rows<Type, T>(item.rows, buffer, warp.lane, value, [&](int r) {
    long long place = SECOND ? rows.slot(r) : item.row + r;
    return reinterpret_cast<uint4*>(out + place * stride);
  });
}

// GEMM 1 with gate: activation(gate, up) by row.
template <int T>
__device__ __forceinline__ void store_gated(const Sums<T>& sums, const PrefillArgs& args, const WorkItem& item, const Warp& warp,
                                            const Rows& rows, u32 buffers, int number, u32& step) {
  int start = item.column_tile * HALF_COLUMNS + warp.block * 64 + warp.pair * 32, m = warp.lane & 3;
  if (start >= args.intermediate_size) return;
  Finish<Type, F> finish(args.w13, item.expert, warp.half * args.intermediate_size + start, size_n_of(args), warp.lane >> 2);
  bool on_input = args.flags & WEIGHT_ON_INPUT;
  Scalar* out = static_cast<Scalar*>(args.activations) + static_cast<u64>(item.row) * args.intermediate_size + start;
  auto to = [&](int r) { return reinterpret_cast<uint4*>(out + static_cast<u64>(r) * args.intermediate_size); };
  u32 mine = buffers + number * EPILOGUE_BYTES, theirs = buffers + (number ^ 2) * EPILOGUE_BYTES;
  GateAndUp<Type, decltype(to)> pair = {mine, theirs, mine + 2 * EXCHANGE_BYTES, warp.lane, 3 + 2 * warp.group + warp.pair,
                                        item.rows, warp.half == 1, to, step};
  auto finished = [&](Octet octet, int i) {
    finish.apply(octet, on_input ? rows.weights(i, m) : make_float2(1.0f, 1.0f));
    return octet;
  };
  if (args.activation == SILU)
    store_pairs<true>(sums, pair, finished, [](float gate, float up) { return fast_silu(gate) * up; });
  else
    store_pairs<false>(sums, pair, finished, [&](float gate, float up) { return activate_gated(gate, up, args); });
}

template <int T>
__device__ __forceinline__ void run_tile(Multiply& multiply, const PrefillArgs& args, const WorkItem& item, u32 round, u32& step) {
  const Warp& warp = multiply.warp;
  int thread = threadIdx.x & 127;
  Rows rows = {multiply.base + L::AT_ROWS + (2 * warp.group + (round & 1)) * L::ROWS};
  bool need_rows = SECOND || args.flags & WEIGHT_ON_INPUT;
  if (need_rows) rows.load(args.routed_rows + item.row, item.rows, thread);
  if constexpr (GROUP == 0) {
    Columns<Type> columns = {};
    if constexpr (!SYMMETRIC) {
      int start = PAIRED ? item.column_tile * HALF_COLUMNS + warp.half * args.intermediate_size + warp.block * 64
                         : item.column_tile * 256 + warp.half * 128 + warp.block * 64;
      u64 place = (static_cast<u64>(item.expert) * size_n_of(args) + start) / 8 + (warp.lane >> 2);  // of 8 zero points
      bool there = start < size_n_of(args);
      u32 word = !there ? 0 : BITS == 4 ? matrix_of(args).zero_points[place] : matrix_of(args).zero_points[2 * place + warp.pair];
      columns.zeros[0] = own_zeros<F>(word, warp.pair);
    }
    multiply.columns.prepare(columns);
  }
  Sums<T> sums;
  sums.clear();
  multiply.add_stages(sums, size_k_of(args) / STAGE_K);
  if (need_rows) {
    wait_for_copies();
    barrier(1 + warp.group, 128);
  }
  int number = (threadIdx.x >> 5) - 4;
  u32 buffers = multiply.base + L::AT_EPILOGUE;
  if constexpr (PAIRED)
    store_gated(sums, args, item, warp, rows, buffers, number, step);
  else
    store_plain(sums, args, item, warp, rows, buffers + number * EPILOGUE_BYTES);
}

// Where GEMM 2 writes `out` itself: tokens whose only slot reaches no expert of this rank.
__device__ __forceinline__ void clear_missing(const PrefillArgs& args) {
  int lane = threadIdx.x & 31, warp = (threadIdx.x >> 5) - 4;
  for (int token = blockIdx.x * CONSUMER_WARPS + warp; token < args.tokens; token += gridDim.x * CONSUMER_WARPS) {
    if (args.slot_is_here[token]) continue;
    uint4* out = reinterpret_cast<uint4*>(static_cast<Scalar*>(args.out) + token * args.out_stride);
    for (int i = lane; i < args.hidden_size / 8; i += 32) out[i] = make_uint4(0, 0, 0, 0);
  }
}

__device__ __forceinline__ void init_ring(u32 base) {
  for (int s = 0; s < STAGES; s++) {
    init_barrier(L::full(base, s), SECOND ? 1 : 1 + L::GATHERED_BY);
    init_barrier(L::empty(base, s), CONSUMER_WARPS);
  }
  for (int q = 0; q < QUEUE; q++) {
    init_barrier(L::item_there(base, q), 1);
    init_barrier(L::item_read(base, q), CONSUMER_WARPS + (SECOND ? 0 : GATHER_WARPS));
  }
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
    prefill_gemm(const __grid_constant__ PrefillArgs args, const __grid_constant__ TensorMap words,
                 const __grid_constant__ TensorMap scales, const __grid_constant__ TensorMap zeros,
                 const __grid_constant__ TensorMap tokens) {
  extern __shared__ __align__(1024) char shared[];
  u32 base = shared_address(shared);
  if (threadIdx.x == 0) init_ring(base);
  __syncthreads();
  if (threadIdx.x < 128) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(PRODUCER_REGISTERS));
    int warp = __shfl_sync(~0u, threadIdx.x >> 5, 0);
    if (warp == 0) {
      if (elect_one())
        load_weights<F, L, STAGES, PAIRED, SECOND>(base, args, {words, scales, zeros}, tokens, size_k_of(args), column_tiles_of(args));
    } else if (!SECOND) {
      gather_tokens<L, TOKEN_TILE, STAGES>(base, args, size_k_of(args));
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
    if (!SECOND && args.flags & DIRECT) clear_missing(args);
    Multiply multiply(base, Warp::of<PAIRED>(threadIdx.x - 128));
    Turn<QUEUE> queue;
    u32 step = 0;
    for (u32 round = 0;; round++) {
      WorkItem item = hear_item<L>(base, queue);
      if (!item.width) break;
      switch (item.width / 8) {
#define CASE(i)                                                                       \
  case i:                                                                             \
    if constexpr (WIDTHS >> i & 1) run_tile<8 * i>(multiply, args, item, round, step); \
    break;
        CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) CASE(9) CASE(10)
        CASE(11) CASE(12) CASE(13) CASE(14) CASE(15) CASE(16) CASE(17) CASE(18) CASE(19) CASE(20)
#undef CASE
      }
    }
  }
}
