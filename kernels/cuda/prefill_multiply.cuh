// The multiplying warps of a prefill block: stages of the ring -> sums of 256 columns times the tile's tokens.
//
// Two warpgroups share a stage: warpgroup g has 128 of its columns, as two wgmmas of 64. A wgmma's 64 rows are four pieces
// of 16 columns, one per warp; warp w has the pieces 2(w mod 2) and 2(w mod 2) + 1 of a block of 64 columns:
//
//   PAIRED (gate and up)  half 0: gate blocks 0, 1   half 1: up blocks 0, 1    warpgroup g, warp w: block g of half w / 2
//   else                  half 0: blocks 0, 1        half 1: blocks 2, 3       warpgroup g, warp w: block w / 2 of half g
//
// While the tensor cores work on some fragments, the next are made of Marlin words in registers.
#pragma once
#include "dequant_fma.cuh"
#include "prefill_ring.cuh"
#include "prefill_wgmma.cuh"

struct Warp {  // which columns of a tile a thread has
  int group, lane, half, block, pair;
  template <bool PAIRED>
  static __device__ __forceinline__ Warp of(int thread) {  // among the multiplying ones
    int number = __shfl_sync(~0u, thread >> 5, 0);  // so that the assembler sees that all lanes have the same
    int group = number >> 2, high = number >> 1 & 1;
    return {group, thread & 31, PAIRED ? high : group, PAIRED ? group : high, number & 1};
  }
};

template <int T>
struct Sums {
  float d[2][T / 2];
  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < T / 2; i++) d[0][i] = d[1][i] = 0.0f;
  }
};

// What a thread reads of a stage: addresses of its first word, scale and zero point in stage 0.
template <class F, class L>
struct Source {
  u32 words, scales, zeros;
  __device__ __forceinline__ Source(u32 base, const Warp& warp) {
    int g = warp.lane >> 2;
    words = L::weights(base, 0) + warp.half * L::HALF + warp.block * 128 * F::BITS + warp.lane * 4 * F::BITS + warp.pair * 2 * F::BITS;
    scales = L::scales(base, 0) + warp.half * L::HALF_SCALES + warp.block * 128 + 16 * g + 8 * warp.pair;
    zeros = L::zeros(base, 0) + warp.half * L::ZEROS_STEP + (warp.block * 8 + g) * F::BITS + (F::BITS == 8 ? 4 * warp.pair : 0);
  }
};

template <class F>
__device__ __forceinline__ u32 own_zeros(u32 word, int pair) {  // the thread's two pieces first
  return F::BITS == 4 ? word >> (8 * pair) : word;
}

// All that a thread needs of a stage, read at once: one wait for shared memory instead of one for every part.
template <class F, class L>
struct StageWords {
  static constexpr int GROUPS = L::GROUPS ? L::GROUPS : 1;
  u32 words[4][F::BITS / 2];  // of the four steps of 16 inputs
  uint2 scales[GROUPS];
  u32 zeros[GROUPS];

  __device__ __forceinline__ void load(const Source<F, L>& from, int stage) {
#pragma unroll
    for (int i = 0; i < L::GROUPS; i++) {
      scales[i] = load_shared<uint2>(from.scales + stage * 2 * L::HALF_SCALES + i * 2 * HALF_COLUMNS);
      if (!F::SYMMETRIC) zeros[i] = load_shared<u32>(from.zeros + stage * 2 * L::ZEROS_STEP + i * HALF_COLUMNS * F::BITS / 8);
    }
#pragma unroll
    for (int s = 0; s < 4; s++) {
      u32 at = from.words + stage * L::WEIGHTS + s * 256 * F::BITS;
      if constexpr (F::BITS == 4) {
        uint2 v = load_shared<uint2>(at);
        words[s][0] = v.x, words[s][1] = v.y;
      } else {
        uint4 v = load_shared<uint4>(at);
        words[s][0] = v.x, words[s][1] = v.y, words[s][2] = v.z, words[s][3] = v.w;
      }
    }
  }

  template <class Type>
  __device__ __forceinline__ Columns<Type> columns(int group, int pair) const {
    Columns<Type> found;
    found.scales[0] = pair_of<typename Type::Pair>(scales[group].x);
    found.scales[1] = pair_of<typename Type::Pair>(scales[group].y);
    if (!F::SYMMETRIC) found.zeros[0] = own_zeros<F>(zeros[group], pair);
    return found;
  }
};

// Of both pieces and STEPS steps of 16 inputs.
template <int STEPS>
struct Fragments { u32 a[STEPS][2][4]; };

template <class Type, class F, class L, int STAGES, int STEPS>
struct Multiplier {
  static constexpr int PARTS = 4 / STEPS, PART_K = 16 * STEPS;
  static constexpr int GROUP_K = L::GROUPS > 1 ? F::GROUP : STAGE_K;  // of a stage's inputs in one group
  u32 base;
  Warp warp;
  Source<F, L> source;
  StageWords<F, L> raw;  // of the stage whose fragments are being made
  Dequantizer<Type, F> columns;
  Turn<STAGES> turn;

  __device__ __forceinline__ Multiplier(u32 base_, const Warp& warp_) : base(base_), warp(warp_), source(base_, warp_) {}

  __device__ __forceinline__ void make(Fragments<STEPS>& fragments, int part) {
    if (F::GROUP && part * PART_K % GROUP_K == 0)
      columns.prepare(raw.template columns<Type>(part * PART_K / GROUP_K, warp.pair));
#pragma unroll
    for (int s = 0; s < STEPS; s++) {
      columns.fragment(fragments.a[s][0], raw.words[part * STEPS + s], 0);
      columns.fragment(fragments.a[s][1], raw.words[part * STEPS + s], 1);
    }
  }

  __device__ __forceinline__ void release(int stage) {
    if (warp.lane == 0) arrive(L::empty(base, stage));
  }

  template <int T>
  __device__ __forceinline__ void add_stages(Sums<T>& sums, int stages) {
    Fragments<STEPS> fragments[2];
    turn.tell_uniform();
    wait(L::full(base, turn.at), turn.parity);
    raw.load(source, turn.at);
    make(fragments[0], 0);
    int before = 0;
#pragma unroll 1
    for (int stage = 0; stage < stages; stage++) {
      u64 tokens = describe_tokens(L::tokens(base, turn.at));
#pragma unroll
      for (int part = 0; part < PARTS; part++) {
        Fragments<STEPS>& now = fragments[part & 1];
        fence_products();
#pragma unroll
        for (int s = 0; s < STEPS; s++)
#pragma unroll
          for (int piece = 0; piece < 2; piece++)
            Products<T>::template add<Type>(sums.d[piece], now.a[s][piece], tokens + 2 * (part * STEPS + s));
        commit_products();
        wait_for_products<1>();  // all but these: the other fragments are free
        if (part == 0 && stage > 0) release(before);
        if (part + 1 < PARTS) {
          make(fragments[(part + 1) & 1], part + 1);
        } else {
          before = turn.at;
          turn.next();
          if (stage + 1 < stages) {
            wait(L::full(base, turn.at), turn.parity);
            raw.load(source, turn.at);
            make(fragments[0], 0);
          }
        }
      }
    }
    wait_for_products<0>();
    release(before);
  }
};
