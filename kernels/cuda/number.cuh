// bf16 and fp16 in pairs: the two 16-bit types that activations and scales can have.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "args.cuh"

struct Bf16 {
  static constexpr float SUM_FACTOR = 4294967296.0f;  // of sums over weights of dequant_fma.cuh
  static constexpr float NIBBLE_BASE = 128.0f;  // 0x4300 with a nibble in the mantissa is 128 + nibble
  typedef __nv_bfloat16 Scalar;
  typedef __nv_bfloat162 Pair;
  static __device__ float to_float(Scalar v) { return __bfloat162float(v); }
  static __device__ Scalar from_float(float v) { return __float2bfloat16_rn(v); }
  static __device__ Pair from_floats(float a, float b) { return __floats2bfloat162_rn(a, b); }
  static __device__ Pair twice(Scalar v) { return __bfloat162bfloat162(v); }
};

struct Fp16 {
  static constexpr float SUM_FACTOR = 1.0f;
  static constexpr float NIBBLE_BASE = 1024.0f;  // 0x6400 likewise
  typedef __half Scalar;
  typedef __half2 Pair;
  static __device__ float to_float(Scalar v) { return __half2float(v); }
  static __device__ Scalar from_float(float v) { return __float2half_rn(v); }
  static __device__ Pair from_floats(float a, float b) { return __floats2half2_rn(a, b); }
  static __device__ Pair twice(Scalar v) { return __half2half2(v); }
};

template <class Pair>
__device__ __forceinline__ u32 bits_of(Pair pair) {
  return *reinterpret_cast<u32*>(&pair);
}

template <class Pair>
__device__ __forceinline__ Pair pair_of(u32 bits) {
  return *reinterpret_cast<Pair*>(&bits);
}

template <bool IS_FP16>
struct SixteenBits { typedef Bf16 Type; };
template <>
struct SixteenBits<true> { typedef Fp16 Type; };
