// A slot: 64 columns x K inputs of a matrix in Marlin order, 2048 bytes of words; and a stage: the slots of eight
// neighbouring column blocks in shared memory, words by steps of 16 inputs, then scales and zero points by groups.
#pragma once
#include "dequant_fma.cuh"

constexpr int STAGE_BLOCKS = 8;

template <class F>
struct Slot {
  static constexpr int K = 256 / F::BITS, STEPS = K / 16, STEP_BYTES = 128 * F::BITS;
  static constexpr int SCALE_GROUPS = F::GROUP == 0 ? 0 : F::GROUP >= K ? 1 : K / F::GROUP;
  static constexpr int ZERO_GROUPS = F::SYMMETRIC ? 0 : F::GROUP == 0 ? 1 : SCALE_GROUPS;
  static constexpr int SCALE_BYTES = 128, ZERO_BYTES = 8 * F::BITS;  // of a group
};

template <class F>
struct Stage {
  typedef Slot<F> S;
  static constexpr int SCALES = STAGE_BLOCKS * S::STEPS * S::STEP_BYTES;
  static constexpr int ZEROS = SCALES + STAGE_BLOCKS * S::SCALE_GROUPS * S::SCALE_BYTES;
  static constexpr int BYTES = ZEROS + STAGE_BLOCKS * S::ZERO_GROUPS * S::ZERO_BYTES;
};

template <class F>
__device__ __forceinline__ void stage_words(u32 (&words)[F::BITS], const char* stage, int n, int step) {
  const char* from = stage + (step * STAGE_BLOCKS + n) * Slot<F>::STEP_BYTES;
  int lane = threadIdx.x & 31;
  if (F::BITS == 4) {
    *reinterpret_cast<uint4*>(words) = *reinterpret_cast<const uint4*>(from + lane * 16);
    return;
  }
  // A lane's 32 bytes, in an order in which eight lanes meet different banks.
  bool swap = lane & 4;
  uint4 one = *reinterpret_cast<const uint4*>(from + lane * 32 + 16 * swap);
  uint4 two = *reinterpret_cast<const uint4*>(from + lane * 32 + 16 * !swap);
  uint4 both[2] = {swap ? two : one, swap ? one : two};
#pragma unroll
  for (int i = 0; i < F::BITS; i++) words[i] = reinterpret_cast<const u32*>(both)[i];
}

// What a lane knows of its columns in group i of a slot.
template <class T, class F>
__device__ __forceinline__ Columns<T> stage_columns(const char* stage, int n, int i) {
  Columns<T> columns;
  int g = (threadIdx.x & 31) >> 2, block = STAGE_BLOCKS * i + n;
  if (Slot<F>::SCALE_GROUPS)
    *reinterpret_cast<uint4*>(columns.scales) = *reinterpret_cast<const uint4*>(stage + Stage<F>::SCALES + block * 128 + 16 * g);
#pragma unroll
  for (int v = 0; v < F::BITS / 4; v++)
    if (Slot<F>::ZERO_GROUPS)
      columns.zeros[v] = *reinterpret_cast<const u32*>(stage + Stage<F>::ZEROS + (8 * block + g) * F::BITS + 4 * v);
  return columns;
}
