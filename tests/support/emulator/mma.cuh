// d += a * b on a CPU: m16n8k16 fragments as PTX lays them over a warp, sums in double, rounded to float.
#pragma once
#include "number.cuh"

struct Fragments { u32 a[4], b[2]; };

template <class T>
inline double element(u32 pair, int half) {
  typename T::Pair two = pair_of<typename T::Pair>(pair);
  return as_double(half ? two.y : two.x);
}

template <class T>
inline void mma(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  const Fragments* all = emulator::exchange(Fragments{{a[0], a[1], a[2], a[3]}, {b0, b1}});
  int lane = threadIdx.x & 31, g = lane >> 2, m = lane & 3;
  for (int i = 0; i < 4; i++) {
    int upper = i >> 1, column = 2 * m + (i & 1);
    double sum = 0;
    for (int k = 0; k < 16; k++) {
      int part = k % 8 / 2, k8 = k / 8;
      sum += element<T>(all[4 * g + part].a[upper + 2 * k8], k & 1) * element<T>(all[4 * column + part].b[k8], k & 1);
    }
    d[i] = static_cast<float>(d[i] + sum);
  }
}
