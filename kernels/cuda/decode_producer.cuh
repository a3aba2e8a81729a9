// What a team's producer warp does: all stages of its team in the order of use, as far ahead as the ring is long.
#pragma once
#include "decode_work.cuh"
#include "stage_copy.cuh"

// Slot `slot` along K of up to eight column blocks, `blocks` from `block` on, and as many from `second` on where that is
// not negative (gate and up), of one expert's matrix.
template <class F, int SIZE_K, int SIZE_N>
__device__ __forceinline__ void copy_stage(char* to, u64* full, const MatrixArgs& matrix, int expert, int slot, int blocks, int block, int second) {
  typedef Slot<F> S;
  constexpr u32 ROW = SIZE_N * 2 * F::BITS, SCALE_ROW = SIZE_N * 2, ZERO_ROW = SIZE_N * F::BITS / 8;  // bytes
  constexpr int GROUPS = F::GROUP ? SIZE_K / F::GROUP : 1;
  constexpr u32 BLOCK_BYTES = S::STEPS * S::STEP_BYTES + S::SCALE_GROUPS * S::SCALE_BYTES + S::ZERO_GROUPS * S::ZERO_BYTES;
  StageCopy copy(full, blocks * (second < 0 ? 1 : 2) * BLOCK_BYTES);
  u64 group = static_cast<u64>(expert) * GROUPS + (F::GROUP ? slot * S::K / F::GROUP : 0);
  const char* words = reinterpret_cast<const char*>(matrix.qweight) + (static_cast<u64>(expert) * (SIZE_K / 16) + slot * S::STEPS) * ROW;
  const char* scales = static_cast<const char*>(matrix.scales) + group * SCALE_ROW;
  const char* zeros = reinterpret_cast<const char*>(matrix.zero_points) + group * ZERO_ROW;
  if (SIZE_N == STAGE_BLOCKS * 64) {  // whole rows, which follow each other
    copy.copy(to, words, S::STEPS * ROW);
    if (S::SCALE_GROUPS) copy.copy(to + Stage<F>::SCALES, scales, S::SCALE_GROUPS * SCALE_ROW);
    if (S::ZERO_GROUPS) copy.copy(to + Stage<F>::ZEROS, zeros, S::ZERO_GROUPS * ZERO_ROW);
  } else {
    auto copy_rows = [&](int rows, char* place, const char* from, u32 row_bytes, u32 block_bytes) {
#pragma unroll 1
      for (int row = 0; row < rows; row++, place += STAGE_BLOCKS * block_bytes, from += row_bytes) {
        copy.copy(place, from + block * block_bytes, blocks * block_bytes);
        if (second >= 0) copy.copy(place + STAGE_BLOCKS / 2 * block_bytes, from + second * block_bytes, blocks * block_bytes);
      }
    };
    copy_rows(S::STEPS, to, words, ROW, S::STEP_BYTES);
    if (S::SCALE_GROUPS) copy_rows(S::SCALE_GROUPS, to + Stage<F>::SCALES, scales, SCALE_ROW, S::SCALE_BYTES);
    if (S::ZERO_GROUPS) copy_rows(S::ZERO_GROUPS, to + Stage<F>::ZEROS, zeros, ZERO_ROW, S::ZERO_BYTES);
  }
  copy.done();
}

// A team's ring of stages: `used` counts those put in or taken out.
struct Ring {
  char* stages;
  u64 *full, *empty;
  int used;
  __device__ __forceinline__ int at() const { return used % RING_STAGES; }
  __device__ __forceinline__ u32 round() const { return used / RING_STAGES; }
  __device__ __forceinline__ char* stage() const { return stages + at() * STAGE_BYTES; }
  __device__ __forceinline__ u64* wait_empty() const {
    wait_for(empty + at(), (round() & 1) ^ 1);
    return full + at();
  }
  __device__ __forceinline__ const char* wait_full() const {
    wait_for(full + at(), round() & 1);
    return stage();
  }
  // Until the last stage that was put in has arrived.
  __device__ __forceinline__ void wait_arrived() const {
    if (used > 0) wait_for(full + (used - 1) % RING_STAGES, (used - 1) / RING_STAGES & 1);
  }
  __device__ __forceinline__ void release() {
    __syncwarp();
    if ((threadIdx.x & 31) == 0) arrive(empty + at());
    used++;
  }
};

__device__ __forceinline__ void produce_first(const MoEArgs& args, const Work& work, const RowTile* tiles, Ring& ring, int team) {
  constexpr int HALF = GATED ? STAGE_BLOCKS / 2 : STAGE_BLOCKS, BLOCKS = INTERMEDIATE / 64;
  u32 at = work.granules.start(blockIdx.x), end = work.granules.start(blockIdx.x + 1);
  while (at < end) {
    Piece piece(at, end);
    at += piece.end - piece.begin;
    int block = piece.strip * HALF, expert = tiles[piece.tile].expert;
    for (int slot = piece.begin + team; slot < piece.end; slot += TEAMS, ring.used++) {
      u64* full = ring.wait_empty();
      copy_stage<W13, HIDDEN, SIZE_N1>(ring.stage(), full, args.w13, expert, slot, min(HALF, BLOCKS - block), block, GATED ? BLOCKS + block : -1);
    }
  }
}

// The stages of GEMM 2, from the `done`th of this team on; stops after `most`.
__device__ __forceinline__ void produce_second(const MoEArgs& args, const Work& work, const RowTile* tiles, Ring& ring, int team, int done, int most) {
  u32 at = work.tasks.start(blockIdx.x), end = work.tasks.start(blockIdx.x + 1);
  for (u32 behind; at < end; at = behind) {
    behind = work.window_end(at);
    for (u32 q = at + team; q < behind; q += TEAMS) {
      Task task(work, q);
      int expert = tiles[task.tile].expert;
      for (int slot = task.begin; slot < task.end; slot++) {
        if (done-- > 0) continue;
        if (most-- == 0) return;
        u64* full = ring.wait_empty();
        copy_stage<W2, INTERMEDIATE, HIDDEN>(ring.stage(), full, args.w2, expert, slot, task.blocks, task.block, -1);
        ring.used++;
      }
    }
  }
}
