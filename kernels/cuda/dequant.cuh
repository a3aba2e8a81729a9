// Marlin words -> A fragments of mma.m16n8k16 (m = columns of the weight, k = its rows), as (q - zero) * scale.
//
// Lane l = 4g + m holds, for each 16-column piece j of a 64-column block, the weights of columns n = 16j + g and
// n + 8 at k0 = 2m, k0 + 1, k0 + 8, k0 + 9, which is one lane's A fragment:
//   a0 (n; k0, k0+1)   a1 (n+8; k0, k0+1)   a2 (n; k0+8, k0+9)   a3 (n+8; k0+8, k0+9)
#pragma once
#include "number.cuh"

// The 4-bit fields at bits 4i and 16 + 4i, minus zero, exact. A nibble under the exponent of 128 (bf16) or 1024
// (fp16) is that number plus the nibble.
template <class T>
__device__ __forceinline__ typename T::Pair nibbles(u32 word, int i, typename T::Pair based_zero);

template <>
__device__ __forceinline__ __nv_bfloat162 nibbles<Bf16>(u32 word, int i, __nv_bfloat162 based_zero) {
  return __hsub2(pair_of<__nv_bfloat162>(((word >> (4 * i)) & 0x000f000fu) | 0x43004300u), based_zero);
}

template <>
__device__ __forceinline__ __half2 nibbles<Fp16>(u32 word, int i, __half2 based_zero) {
  return __hsub2(pair_of<__half2>(((word >> (4 * i)) & 0x000f000fu) | 0x64006400u), based_zero);
}

// The bytes i and i + 2, minus zero, exact: 9 bits with sign fit both types.
template <class T>
__device__ __forceinline__ typename T::Pair two_bytes(u32 word, int i, float zero);

template <>
__device__ __forceinline__ __nv_bfloat162 two_bytes<Bf16>(u32 word, int i, float zero) {
  // A byte in the mantissa of 2^23 is that number plus the byte.
  float low = __uint_as_float(__byte_perm(word, 0x4b000000u, 0x7440 | i)) - 8388608.0f;
  float high = __uint_as_float(__byte_perm(word, 0x4b000000u, 0x7440 | (i + 2))) - 8388608.0f;
  return __floats2bfloat162_rn(low - zero, high - zero);
}

template <>
__device__ __forceinline__ __half2 two_bytes<Fp16>(u32 word, int i, float zero) {
  u32 based = __byte_perm(word, 0x64646464u, 0x4040 | i | ((i + 2) << 8));
  return __hsub2(pair_of<__half2>(based), __float2half2_rn(1024.0f + zero));
}

// What a lane knows of its eight columns (16j + g and 16j + g + 8, j = 0..3) in one group of K.
template <class T>
struct Columns {
  typename T::Scalar scales[8];  // [2j] of n, [2j + 1] of n + 8
  u32 zeros[2];                  // 4 bits: word 0; 8 bits: both
};

template <class T, int BITS, bool SYMMETRIC>
__device__ __forceinline__ float zero_of(const Columns<T>& columns, int j, int half) {
  if (SYMMETRIC) return 1 << (BITS - 1);
  // Within 8 (4 for 8 bits) values the even ones come first: value 2j + half.
  if (BITS == 4) return (columns.zeros[0] >> (4 * (j + 4 * half))) & 15;
  return (columns.zeros[j >> 1] >> (8 * ((j & 1) + 2 * half))) & 255;
}

// A fragment of piece j. SCALED: scale here; else the caller scales sums (one group along K).
template <class T, int BITS, bool SYMMETRIC, bool SCALED>
__device__ __forceinline__ void fragment(u32 (&a)[4], const u32* words, int j, const Columns<T>& columns) {
  typedef typename T::Pair Pair;
#pragma unroll
  for (int half = 0; half < 2; half++) {
    float zero = zero_of<T, BITS, SYMMETRIC>(columns, j, half);
#pragma unroll
    for (int k8 = 0; k8 < 2; k8++) {
      Pair pair;
      if (BITS == 4) {
        float based = T::NIBBLE_BASE + zero;
        pair = nibbles<T>(words[j], 2 * half + k8, T::from_floats(based, based));
      } else {
        pair = two_bytes<T>(words[2 * j + half], k8, zero);
      }
      if (SCALED) pair = __hmul2(pair, T::twice(columns.scales[2 * j + half]));
      a[half + 2 * k8] = bits_of(pair);
    }
  }
}
