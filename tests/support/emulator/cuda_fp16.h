// fp16 in pairs on a CPU, as cuda_bf16.h.
#pragma once
#include "cuda_bf16.h"

struct __half { _Float16 value; };
struct __half2 { __half x, y; };

inline float __half2float(__half v) { return static_cast<float>(v.value); }
inline __half half_of(double v) { return {static_cast<_Float16>(emulator::rounded(v, 11, -24, 65504))}; }
inline __half __float2half_rn(float v) { return half_of(v); }
inline __half2 __floats2half2_rn(float a, float b) { return {half_of(a), half_of(b)}; }
inline __half2 __float2half2_rn(float v) { return {half_of(v), half_of(v)}; }
inline __half2 __half2half2(__half v) { return {v, v}; }
inline __half2 __low2half2(__half2 v) { return {v.x, v.x}; }
inline __half2 __high2half2(__half2 v) { return {v.y, v.y}; }
inline double as_double(__half v) { return static_cast<double>(v.value); }
inline __half2 __hfma2(__half2 a, __half2 b, __half2 c) {
  return {half_of(as_double(a.x) * as_double(b.x) + as_double(c.x)), half_of(as_double(a.y) * as_double(b.y) + as_double(c.y))};
}
inline __half2 __hmul2(__half2 a, __half2 b) { return {half_of(as_double(a.x) * as_double(b.x)), half_of(as_double(a.y) * as_double(b.y))}; }
inline __half2 __hadd2(__half2 a, __half2 b) { return {half_of(as_double(a.x) + as_double(b.x)), half_of(as_double(a.y) + as_double(b.y))}; }
inline __half2 __hsub2(__half2 a, __half2 b) { return {half_of(as_double(a.x) - as_double(b.x)), half_of(as_double(a.y) - as_double(b.y))}; }
