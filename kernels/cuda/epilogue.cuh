// Sums of a tile -> activations (GEMM 1) or one row per slot (GEMM 2), through shared memory, so that all threads
// take part and neighbours store neighbouring columns.
#pragma once
#include "activation.cuh"
#include "finish.cuh"
#include "gemm.cuh"

template <int TOKEN_TILE>
struct TileSums {  // [column of the tile][token], a word more per column against bank conflicts
  float sums[64 * COLUMN_BLOCKS][TOKEN_TILE + 1];

  // A lane's sums of piece j and octet o: column 16j + g of tokens 8o + 2m and 8o + 2m + 1, then column 16j + g + 8.
  __device__ __forceinline__ void put(const Sums<TOKEN_TILE>& from, int block) {
    int lane = threadIdx.x & 31, g = lane >> 2, m = lane & 3;
#pragma unroll
    for (int j = 0; j < 4; j++)
#pragma unroll
      for (int o = 0; o < Sums<TOKEN_TILE>::OCTETS; o++)
#pragma unroll
        for (int i = 0; i < 4; i++)
          sums[64 * block + 16 * j + 8 * (i >> 1) + g][8 * o + 2 * m + (i & 1)] = from.d[j][o][i];
  }
};

// A tile's sums to their place in memory, [token][column].
template <int TOKEN_TILE>
__device__ __forceinline__ void store_split(float* to, const TileSums<TOKEN_TILE>& tile, int rows) {
  for (int i = threadIdx.x; i < rows * 128; i += THREADS) to[i] = tile.sums[i % 128][i / 128];
}

// activation(gate, up) of the tile's activation columns from `start` on: 64 when GATED (block 0 gate, block 1 up).
// sum_of(column of the tile, token) is a finished sum over K.
template <class T, class F, bool GATED, class SumOf>
__device__ __forceinline__ void store_activations(const MoEArgs& args, SumOf sum_of, int expert, int start, int row,
                                                  int rows, const float* input_weights) {
  constexpr int COLUMNS = GATED ? 64 : 128;
  int size_n = args.intermediate_size * (GATED ? 2 : 1);
  typename T::Scalar* activations = static_cast<typename T::Scalar*>(args.activations);
  for (int i = threadIdx.x; i < rows * COLUMNS; i += THREADS) {
    int token = i / COLUMNS, c = i % COLUMNS, n = start + c;
    if (n >= args.intermediate_size) continue;
    float weight = input_weights[token], up = 0.0f;
    float gate = finish<T, F>(sum_of(c, token), args.w13, expert, n, size_n, weight);
    if (GATED) up = finish<T, F>(sum_of(64 + c, token), args.w13, expert, args.intermediate_size + n, size_n, weight);
    activations[static_cast<u64>(row + token) * args.intermediate_size + n] =
        T::from_float(activate(gate, up, args));
  }
}

// (sum + bias) * output weight of the tile's 128 columns from `start` on, to the rows' slots; of several splits of K
// the first adds the bias, and each has a buffer of its own.
template <class T, class F, int TOKEN_TILE>
__device__ __forceinline__ void store_slots(const MoEArgs& args, const TileSums<TOKEN_TILE>& tile, int expert, int start,
                                            int rows, const int* row_slots, const float* output_weights,
                                            bool slots_fp32, int split) {
  MatrixArgs matrix = args.w2;
  if (split > 0) matrix.bias = nullptr;
  u64 first_slot = static_cast<u64>(split) * args.tokens * args.top_k;
  for (int i = threadIdx.x; i < rows * 128; i += THREADS) {
    int token = i / 128, c = i % 128, n = start + c;
    if (n >= args.hidden_size) continue;
    float v = finish<T, F>(tile.sums[c][token], matrix, expert, n, args.hidden_size, 1.0f) * output_weights[token];
    u64 place = (first_slot + row_slots[token]) * args.hidden_size + n;
    if (slots_fp32)
      static_cast<float*>(args.w2_output)[place] = v;
    else
      static_cast<typename T::Scalar*>(args.w2_output)[place] = T::from_float(v);
  }
}
