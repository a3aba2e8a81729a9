// A warp's multiplication: its slot of a stage times the tokens of its inputs, which lie in shared memory by rows.
#pragma once
#include "decode_shape.cuh"
#include "mma.cuh"

// Sums of a warp: [piece j of 16 columns][octet of tokens][c0 c1 of column 16j + g, c2 c3 of column 16j + g + 8].
template <int OCTETS>
struct WarpSums {
  float d[4][OCTETS][4];
  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < 16 * OCTETS; i++) (&d[0][0][0])[i] = 0.0f;
  }
};

// B fragments of steps s and s + 1 (one octet), or of octets o and o + 1 of step s, by one ldmatrix.
template <int OCTETS, class Scalar>
__device__ __forceinline__ void load_tokens(u32 (&b)[2][OCTETS][2], const Scalar* tokens, int row_elements, int s) {
  int lane = threadIdx.x & 31;
  if constexpr (OCTETS == 1) {
    u32 r[4];
    load_matrices(r, tokens + (lane & 7) * row_elements + 16 * s + 8 * (lane >> 3));
    b[0][0][0] = r[0], b[0][0][1] = r[1], b[1][0][0] = r[2], b[1][0][1] = r[3];
  } else {
#pragma unroll
    for (int i = 0; i < 2; i++)
#pragma unroll
      for (int o = 0; o + 1 < OCTETS; o += 2) {
        u32 r[4];
        load_matrices(r, tokens + (8 * (o + (lane >> 4)) + (lane & 7)) * row_elements + 16 * (s + i) + 8 * ((lane >> 3) & 1));
        b[i][o][0] = r[0], b[i][o][1] = r[1], b[i][o + 1][0] = r[2], b[i][o + 1][1] = r[3];
      }
  }
}

// A warp's slot of a stage, in registers.
template <class T, class F>
struct SlotWords {
  static constexpr int STEPS = Slot<F>::STEPS, GROUPS = Slot<F>::SCALE_GROUPS > Slot<F>::ZERO_GROUPS ? Slot<F>::SCALE_GROUPS : Slot<F>::ZERO_GROUPS;
  u32 words[STEPS][F::BITS];
  Columns<T> columns[GROUPS > 0 ? GROUPS : 1];

  __device__ __forceinline__ void read(const char* stage, int n) {
#pragma unroll
    for (int i = 0; i < GROUPS; i++) columns[i] = stage_columns<T, F>(stage, n, i);
#pragma unroll
    for (int s = 0; s < STEPS; s++) stage_words<F>(words[s], stage, n, s);
  }
};

// sums += a slot * tokens, for the first OCTETS of the sums' octets (1, 2 or 4).
template <int OCTETS, class T, class F, int ALL>
__device__ __forceinline__ void multiply_slot(WarpSums<ALL>& sums, const SlotWords<T, F>& slot, const typename T::Scalar* tokens, int row_elements) {
  Dequantizer<T, F> ready;
#pragma unroll
  for (int s = 0; s < Slot<F>::STEPS; s += 2) {
    u32 b[2][OCTETS][2];
    load_tokens<OCTETS>(b, tokens, row_elements, s);
    if (s == 0 || (F::GROUP && 16 * s % F::GROUP == 0)) ready.prepare(slot.columns[F::GROUP ? 16 * s / F::GROUP : 0]);
#pragma unroll
    for (int i = 0; i < 2; i++)
#pragma unroll
      for (int j = 0; j < 4; j++) {
        u32 a[4];
        ready.fragment(a, slot.words[s + i], j);
#pragma unroll
        for (int o = 0; o < OCTETS; o++) mma<T>(sums.d[j][o], a, b[i][o][0], b[i][o][1]);
      }
  }
}

// The same for as many octets as the tile's rows fill.
template <class T, class F, int ALL>
__device__ __forceinline__ void multiply_rows(WarpSums<ALL>& sums, const SlotWords<T, F>& slot, const typename T::Scalar* tokens, int row_elements, int rows) {
  if (ALL == 1 || rows <= 8)
    multiply_slot<1>(sums, slot, tokens, row_elements);
  else if (ALL == 2 || rows <= 16)
    multiply_slot<(ALL >= 2 ? 2 : 1)>(sums, slot, tokens, row_elements);
  else
    multiply_slot<ALL>(sums, slot, tokens, row_elements);
}
