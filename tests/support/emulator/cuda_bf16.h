// bf16 in pairs on a CPU: every operation rounds its exact result once, to the nearest, ties to even.
#pragma once
#include "runtime.h"

namespace emulator {
// A number of `digits` binary digits whose smallest step is 2^least; beyond `most` it is infinite.
inline double rounded(double v, int digits, int least, double most) {
  if (v == 0 || !std::isfinite(v)) return v;
  int exponent;
  std::frexp(v, &exponent);
  double step = std::ldexp(1.0, std::max(exponent - digits, least)), near = std::nearbyint(v / step) * step;
  return std::fabs(near) > most ? std::copysign(INFINITY, v) : near;
}
}  // namespace emulator

struct __nv_bfloat16 { unsigned short bits; };
struct __nv_bfloat162 { __nv_bfloat16 x, y; };

inline float __bfloat162float(__nv_bfloat16 v) { return __uint_as_float(static_cast<unsigned>(v.bits) << 16); }
inline __nv_bfloat16 bf16_of(double v) {
  float f = static_cast<float>(emulator::rounded(v, 8, -133, 3.3895313892515355e38));
  unsigned bits;
  memcpy(&bits, &f, 4);
  return {static_cast<unsigned short>(bits >> 16)};
}
inline __nv_bfloat16 __float2bfloat16_rn(float v) { return bf16_of(v); }
inline __nv_bfloat162 __floats2bfloat162_rn(float a, float b) { return {bf16_of(a), bf16_of(b)}; }
inline __nv_bfloat162 __bfloat162bfloat162(__nv_bfloat16 v) { return {v, v}; }
inline __nv_bfloat162 __low2bfloat162(__nv_bfloat162 v) { return {v.x, v.x}; }
inline __nv_bfloat162 __high2bfloat162(__nv_bfloat162 v) { return {v.y, v.y}; }
inline double as_double(__nv_bfloat16 v) { return __bfloat162float(v); }
inline __nv_bfloat162 __hfma2(__nv_bfloat162 a, __nv_bfloat162 b, __nv_bfloat162 c) {
  return {bf16_of(as_double(a.x) * as_double(b.x) + as_double(c.x)), bf16_of(as_double(a.y) * as_double(b.y) + as_double(c.y))};
}
inline __nv_bfloat162 __hmul2(__nv_bfloat162 a, __nv_bfloat162 b) {
  return {bf16_of(as_double(a.x) * as_double(b.x)), bf16_of(as_double(a.y) * as_double(b.y))};
}
inline __nv_bfloat162 __hsub2(__nv_bfloat162 a, __nv_bfloat162 b) {
  return {bf16_of(as_double(a.x) - as_double(b.x)), bf16_of(as_double(a.y) - as_double(b.y))};
}
