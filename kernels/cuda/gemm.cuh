// One block's tile of a grouped GEMM: 128 columns of an expert's weight times up to TOKEN_TILE tokens, all of K.
//
//   8 warps: 2 column blocks of 64 (gate and up of the same columns, or neighbours) x 4 parts of K
//   K in chunks of 256: part p takes k = 64p .. 64p + 63 of each. The chunk's tokens lie in shared memory, the next
//   chunk's are on their way; weights go straight to registers, one chunk ahead.
//
// The four parts are added in a fixed order, so the same call gives the same bits.
#pragma once
#include "dequant.cuh"
#include "load.cuh"
#include "mma.cuh"

constexpr int WARPS_K = 4, COLUMN_BLOCKS = 2, THREADS = 32 * WARPS_K * COLUMN_BLOCKS;
constexpr int CHUNK_K = 256, WARP_K = CHUNK_K / WARPS_K, STEPS = WARP_K / 16;
constexpr int ROW_ELEMENTS = CHUNK_K + 8;  // 16 bytes more, so that eight rows fall into different banks

template <int BITS_, int GROUP_, bool SYMMETRIC_>  // GROUP 0: one scale per column
struct Format {
  static constexpr int BITS = BITS_, GROUP = GROUP_;
  static constexpr bool SYMMETRIC = SYMMETRIC_;
  static constexpr int GROUPS = GROUP == 32 ? 2 : 1;  // groups that a warp's 64 inputs touch
};

// A warp's weights of one chunk: 64 inputs x 64 columns. Each step is loaded for the next chunk as soon as it is used.
template <class T, class F>
struct Weights {
  u32 words[STEPS][F::BITS];
  Columns<T> columns[F::GROUPS], next_columns[F::GROUPS];

  __device__ __forceinline__ void load_step(int s, const MatrixArgs& matrix, int expert, int k, int column, int size_k,
                                            int size_n) {
    u64 row = static_cast<u64>(expert) * (size_k / 16) + k / 16 + s;
    const u32* from = matrix.qweight + row * (size_n * F::BITS / 2) + column * (F::BITS / 2) + (threadIdx.x & 31) * F::BITS;
#pragma unroll
    for (int v = 0; v < F::BITS; v += 4) *reinterpret_cast<uint4*>(&words[s][v]) = load_stream(from + v);
  }

  __device__ __forceinline__ void load_next_columns(const MatrixArgs& matrix, int expert, int k, int column, int size_k,
                                                    int size_n) {
    int g = (threadIdx.x & 31) >> 2, groups = F::GROUP ? size_k / F::GROUP : 1;
#pragma unroll
    for (int i = 0; i < F::GROUPS; i++) {
      u64 group = static_cast<u64>(expert) * groups + (F::GROUP ? k / F::GROUP + i : 0);
      if (F::GROUP)
        *reinterpret_cast<uint4*>(next_columns[i].scales) = __ldg(reinterpret_cast<const uint4*>(
            static_cast<const typename T::Scalar*>(matrix.scales) + group * size_n + column + 8 * g));
      if (!F::SYMMETRIC)
#pragma unroll
        for (int v = 0; v < F::BITS / 4; v++)
          next_columns[i].zeros[v] =
              __ldg(matrix.zero_points + (group * size_n + column) * F::BITS / 32 + g * F::BITS / 4 + v);
    }
  }

  __device__ __forceinline__ void take_columns() {
#pragma unroll
    for (int i = 0; i < F::GROUPS; i++) columns[i] = next_columns[i];
  }
};

// Sums of a warp: [piece j of 16 columns][octet of tokens][c0 c1 of column 16j + g, c2 c3 of column 16j + g + 8].
template <int TOKEN_TILE>
struct Sums {
  static constexpr int OCTETS = TOKEN_TILE / 8;
  float d[4][OCTETS][4];
};

// sums += weights * tokens for step s: 16 inputs of a chunk whose tokens are in `tokens` [TOKEN_TILE][ROW_ELEMENTS].
template <class T, class F, int TOKEN_TILE>
__device__ __forceinline__ void multiply_step(Sums<TOKEN_TILE>& sums, const Weights<T, F>& weights, int s,
                                              const typename T::Scalar* tokens, int part) {
  constexpr int OCTETS = TOKEN_TILE / 8;
  int lane = threadIdx.x & 31;
  u32 b[OCTETS][2];
  // Matrices of one load: octet o, inputs 0..7 | inputs 8..15, then octet o + 1 alike (again o where it is the last).
#pragma unroll
  for (int o = 0; o < OCTETS; o += 2) {
    int octet = o + (OCTETS > 1 ? lane >> 4 : 0);
    u32 r[4];
    load_matrices(r, tokens + (8 * octet + (lane & 7)) * ROW_ELEMENTS + part * WARP_K + 16 * s + 8 * ((lane >> 3) & 1));
    b[o][0] = r[0], b[o][1] = r[1];
    if (o + 1 < OCTETS) b[o + 1][0] = r[2], b[o + 1][1] = r[3];
  }
#pragma unroll
  for (int j = 0; j < 4; j++) {
    u32 a[4];
    fragment<T, F::BITS, F::SYMMETRIC, (F::GROUP > 0)>(a, weights.words[s], j, weights.columns[F::GROUPS == 2 ? s / 2 : 0]);
#pragma unroll
    for (int o = 0; o < OCTETS; o++) mma<T>(sums.d[j][o], a, b[o][0], b[o][1]);
  }
}

// The sums of part 0 += those of parts 3, 2, 1 in that order: 3 into 2, 2 into 1, 1 into 0, through shared memory.
template <int TOKEN_TILE>
__device__ __forceinline__ void add_parts(Sums<TOKEN_TILE>& sums, float4* exchange, int part, int block) {
  constexpr int FRAGMENTS = 4 * Sums<TOKEN_TILE>::OCTETS;
  float4* mine = exchange + block * FRAGMENTS * 32 + (threadIdx.x & 31);
  float* flat = &sums.d[0][0][0];
  for (int from = WARPS_K - 1; from > 0; from--) {
    __syncthreads();
    if (part == from)
#pragma unroll
      for (int f = 0; f < FRAGMENTS; f++)
        mine[32 * f] = make_float4(flat[4 * f], flat[4 * f + 1], flat[4 * f + 2], flat[4 * f + 3]);
    __syncthreads();
    if (part == from - 1)
#pragma unroll
      for (int f = 0; f < FRAGMENTS; f++) {
        float4 v = mine[32 * f];
        flat[4 * f] += v.x, flat[4 * f + 1] += v.y, flat[4 * f + 2] += v.z, flat[4 * f + 3] += v.w;
      }
  }
}

// Into how many parts K is split over blocks where tiles alone do not fill the grid: the number that takes the
// fewest chunks one after another, two more per part for starting and adding. The same for all blocks.
__device__ __forceinline__ int split_count(u64 items, int size_k, u64 capacity, int most) {
  int chunks = (size_k + CHUNK_K - 1) / CHUNK_K, best = 1;
  u64 grid = gridDim.x, least = (items + grid - 1) / grid * (chunks + 2);
  for (int s = 2; s <= min(most, chunks) && items * s <= capacity; s++) {
    u64 cost = (items * s + grid - 1) / grid * ((chunks + s - 1) / s + 2);
    if (cost < least) least = cost, best = s;
  }
  return best;
}

struct Inputs {  // of a split: k from `begin` to `end`, whole chunks but for the last
  int begin, end;
  __device__ __forceinline__ Inputs(int size_k, int split, int splits) {
    int chunks = (size_k + CHUNK_K - 1) / CHUNK_K, share = (chunks + splits - 1) / splits;
    begin = min(split * share * CHUNK_K, size_k);
    end = min(begin + share * CHUNK_K, size_k);
  }
};

// The sums of a tile over `inputs`, complete in part 0. `column` is where the warp's 64 columns start, < 0 when it
// has none. load_tokens(buffer, k) starts the copy of inputs k .. k + 255 of the tile's tokens into a buffer.
template <class T, class F, int TOKEN_TILE, class LoadTokens>
__device__ __forceinline__ void multiply_tile(Sums<TOKEN_TILE>& sums, const MatrixArgs& matrix, int expert, int column,
                                              int size_k, int size_n, Inputs inputs, typename T::Scalar* shared,
                                              LoadTokens load_tokens) {
  constexpr int BUFFER = TOKEN_TILE * ROW_ELEMENTS;
  int warp = threadIdx.x >> 5, part = warp % WARPS_K, block = warp / WARPS_K;
#pragma unroll
  for (int f = 0; f < 4 * Sums<TOKEN_TILE>::OCTETS * 4; f++) (&sums.d[0][0][0])[f] = 0.0f;

  Weights<T, F> weights;
  __syncthreads();  // the buffers may still be read as the last tile's sums
  load_tokens(shared, inputs.begin);
  commit_copies();
  int k = inputs.begin + part * WARP_K;
  bool here = column >= 0 && k < inputs.end;
  if (here) {
#pragma unroll
    for (int s = 0; s < STEPS; s++) weights.load_step(s, matrix, expert, k, column, size_k, size_n);
    weights.load_next_columns(matrix, expert, k, column, size_k, size_n);
  }
  int chunks = (inputs.end - inputs.begin + CHUNK_K - 1) / CHUNK_K;
  for (int c = 0; c < chunks; c++, k += CHUNK_K) {
    wait_for_copies();
    __syncthreads();
    if (c + 1 < chunks) load_tokens(shared + ((c + 1) & 1) * BUFFER, inputs.begin + (c + 1) * CHUNK_K);
    commit_copies();
    bool next_here = column >= 0 && k + CHUNK_K < inputs.end;
    if (!here) continue;  // the next chunk lies further behind the end of K still
    weights.take_columns();
    if (next_here) weights.load_next_columns(matrix, expert, k + CHUNK_K, column, size_k, size_n);
#pragma unroll
    for (int s = 0; s < STEPS; s++) {
      multiply_step<T, F, TOKEN_TILE>(sums, weights, s, shared + (c & 1) * BUFFER, part);
      if (next_here) weights.load_step(s, matrix, expert, k + CHUNK_K, column, size_k, size_n);
    }
    here = next_here;
  }
  add_parts<TOKEN_TILE>(sums, reinterpret_cast<float4*>(shared), part, block);
}
