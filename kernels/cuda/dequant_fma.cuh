// Marlin words -> A fragments of mma.m16n8k16 (m = columns of the weight, k = its rows), as
// (q - zero) * scale / T::SUM_FACTOR; whoever finishes a sum multiplies it by T::SUM_FACTOR.
//
// Lane l = 4g + m holds, for each 16-column piece j of a 64-column block, the weights of columns n = 16j + g and
// n + 8 at k0 = 2m, k0 + 1, k0 + 8, k0 + 9, which is one lane's A fragment:
//   a0 (n; k0, k0+1)   a1 (n+8; k0, k0+1)   a2 (n; k0+8, k0+9)   a3 (n+8; k0+8, k0+9)
//
// bf16: a masked nibble or byte, left where it is, is a bf16 near the smallest one: q * 2^-133 (4 bits higher:
// q * 2^-129), linear up to 255. So one fma brings it to scale, (q - zero) * scale rounded once. The factor 2^-32
// keeps 2^133 * scale finite: scales from 2^-90 to 2^26 are exact to that rounding; at larger ones the sum is
// infinite, not wrong.
// fp16: the same bits under the exponent of 1024 are 1024 + q (or 1024 + 16q); minus zero is exact, then scaled.
#pragma once
#include "number.cuh"

template <int BITS_, int GROUP_, bool SYMMETRIC_>  // GROUP 0: one scale per column, applied to sums
struct Format {
  static constexpr int BITS = BITS_, GROUP = GROUP_;
  static constexpr bool SYMMETRIC = SYMMETRIC_;
  static constexpr int FIELDS = BITS == 4 ? 2 : 1;  // places in a half word that a field is used at
  static constexpr int ZERO = 1 << (BITS - 1);      // of symmetric formats
};

// What a lane reads of its eight columns (16j + g and 16j + g + 8, j = 0..3) in one group of K.
template <class T>
struct Columns {
  typename T::Pair scales[4];  // (n, n + 8) of each piece
  u32 zeros[2];                // 4 bits: word 0; 8 bits: both
};

template <class F, class T>
__device__ __forceinline__ float zero_of(const Columns<T>& columns, int j, int half) {
  // Within 8 (4 for 8 bits) values the even ones come first: value 2j + half.
  if (F::BITS == 4) return (columns.zeros[0] >> (4 * (j + 4 * half))) & 15;
  return (columns.zeros[j >> 1] >> (8 * ((j & 1) + 2 * half))) & 255;
}

// The two fields of a fragment's register in their half words, and which of FIELDS places that is.
template <class F>
__device__ __forceinline__ u32 two_fields(const u32* words, int j, int half, int k8) {
  if (F::BITS == 4) return (half ? words[j] >> 8 : words[j]) & (k8 ? 0x00f000f0u : 0x000f000fu);
  return (k8 ? words[2 * j + half] >> 8 : words[2 * j + half]) & 0x00ff00ffu;
}

__device__ __forceinline__ constexpr u32 two_bf16(int exponent, bool negative = false) {  // +-2^exponent twice
  return ((exponent + 127) << 7 | (negative ? 0x8000 : 0)) * 0x10001u;
}

template <class Pair>
__device__ __forceinline__ Pair same(Pair pair, int half);
template <>
__device__ __forceinline__ __nv_bfloat162 same(__nv_bfloat162 pair, int half) {
  return half ? __high2bfloat162(pair) : __low2bfloat162(pair);
}
template <>
__device__ __forceinline__ __half2 same(__half2 pair, int half) {
  return half ? __high2half2(pair) : __low2half2(pair);
}

// A group's columns, ready to make fragments of.
template <class T, class F>
struct Dequantizer;

template <class F>
struct Dequantizer<Bf16, F> {
  typedef __nv_bfloat162 Pair;
  static constexpr bool SCALED = F::GROUP > 0;
  Pair factors[F::FIELDS][4], offsets[4], scales[4];

  __device__ __forceinline__ void prepare(const Columns<Bf16>& columns) {
#pragma unroll
    for (int j = 0; j < 4; j++) {
      if (!F::SYMMETRIC) {
        scales[j] = columns.scales[j];
        constexpr float DOWN = -1.0f / Bf16::SUM_FACTOR;
        offsets[j] = Bf16::from_floats(DOWN * zero_of<F>(columns, j, 0), DOWN * zero_of<F>(columns, j, 1));
      } else if (SCALED) {
#pragma unroll
        for (int field = 0; field < F::FIELDS; field++)
          factors[field][j] = __hmul2(columns.scales[j], pair_of<Pair>(two_bf16(101 - 4 * field)));
        offsets[j] = __hmul2(columns.scales[j], pair_of<Pair>(two_bf16(F::BITS - 1 - 32, true)));
      }
    }
  }

  __device__ __forceinline__ void fragment(u32 (&a)[4], const u32* words, int j) const {
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
      for (int k8 = 0; k8 < 2; k8++) {
        int field = F::BITS == 4 ? k8 : 0;
        Pair q = pair_of<Pair>(two_fields<F>(words, j, half, k8));
        Pair up = pair_of<Pair>(two_bf16(101 - 4 * field));
        if (F::SYMMETRIC && SCALED)
          q = __hfma2(q, same(factors[field][j], half), same(offsets[j], half));
        else if (F::SYMMETRIC)
          q = __hfma2(q, up, pair_of<Pair>(two_bf16(F::BITS - 1 - 32, true)));
        else
          q = __hfma2(q, up, same(offsets[j], half));
        if (!F::SYMMETRIC && SCALED) q = __hmul2(q, same(scales[j], half));
        a[half + 2 * k8] = bits_of(q);
      }
  }
};

template <class F>
struct Dequantizer<Fp16, F> {
  typedef __half2 Pair;
  Pair scales[4], zeros[4];

  __device__ __forceinline__ void prepare(const Columns<Fp16>& columns) {
#pragma unroll
    for (int j = 0; j < 4; j++) {
      scales[j] = columns.scales[j];
      if (!F::SYMMETRIC) zeros[j] = Fp16::from_floats(-zero_of<F>(columns, j, 0), -zero_of<F>(columns, j, 1));
    }
  }

  __device__ __forceinline__ void fragment(u32 (&a)[4], const u32* words, int j) const {
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
      for (int k8 = 0; k8 < 2; k8++) {
        bool shifted = F::BITS == 4 && k8;  // 1024 + 16q there
        Pair q = pair_of<Pair>(two_fields<F>(words, j, half, k8) | 0x64006400u);
        float base = -(shifted ? 64.0f : 1024.0f);
        Pair offset = __float2half2_rn(base - F::ZERO);
        if (!F::SYMMETRIC) offset = __hadd2(same(zeros[j], half), __float2half2_rn(base));
        q = shifted ? __hfma2(q, __float2half2_rn(0.0625f), offset) : __hadd2(q, offset);
        if (F::GROUP) q = __hmul2(q, same(scales[j], half));
        a[half + 2 * k8] = bits_of(q);
      }
  }
};
