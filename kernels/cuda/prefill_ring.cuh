// Shared memory of a prefill block, and what moves data into it and says that it is there.
//
//   stage: 64 inputs of the weight's 256 columns (two halves of 128) and of up to TOKEN_TILE tokens
//     tokens   [TOKEN_TILE][64]       rows of 128 bytes; the 16-byte piece c of row r lies at c ^ (r mod 8), as wgmma
//                                     and the copy engine understand by a swizzle of 128 bytes
//     weights  [half][4][128 columns] Marlin words: 4 rows of 16 inputs
//     scales   [half][groups][128]
//     zeros    [half][groups][128]    zero points, packed
//
// full[s]: stage s has arrived; empty[s]: both warpgroups are done with it. The work items go through a ring of their own.
#pragma once
#include "load.cuh"
#include "prefill_args.cuh"

struct alignas(64) TensorMap { u64 words[16]; };  // CUtensorMap

constexpr int CONSUMER_WARPS = 8, GATHER_WARPS = 3, QUEUE = 4, STAGE_K = 64, HALF_COLUMNS = 128;
constexpr int EPILOGUE_BYTES = 2560;  // of a warp

struct WorkItem {
  int expert, column_tile, row, rows;
  int width;  // 0: nothing is left
};

template <class F, int TOKEN_TILE, int STAGES>
struct Layout {
  static constexpr int GROUPS = F::GROUP == 0 ? 0 : F::GROUP >= STAGE_K ? 1 : STAGE_K / F::GROUP;  // of a stage
  static constexpr int TOKEN_ROWS = (TOKEN_TILE + 15) / 16 * 16;  // what the copy engine writes, 16 rows at a time
  static constexpr int TOKENS = TOKEN_ROWS * STAGE_K * 2;
  static constexpr int HALF = 1024 * F::BITS, WEIGHTS = 2 * HALF;
  static constexpr int HALF_SCALES = GROUPS * HALF_COLUMNS * 2;
  static constexpr int HALF_ZEROS = F::SYMMETRIC ? 0 : GROUPS * HALF_COLUMNS * F::BITS / 8;
  static constexpr int ZEROS_STEP = (HALF_ZEROS + 127) / 128 * 128;  // the copy engine wants multiples of 128
  static constexpr int ROWS = TOKEN_TILE * 8;
  static constexpr int GATHERED_BY = TOKEN_TILE <= 48 ? 1 : GATHER_WARPS;  // warps, in GEMM 1: a stage's tokens
  static constexpr int AT_WEIGHTS = STAGES * TOKENS, AT_SCALES = AT_WEIGHTS + STAGES * WEIGHTS,
                       AT_ZEROS = AT_SCALES + STAGES * 2 * HALF_SCALES, AT_EPILOGUE = AT_ZEROS + STAGES * 2 * ZEROS_STEP,
                       AT_ROWS = AT_EPILOGUE + CONSUMER_WARPS * EPILOGUE_BYTES, AT_QUEUE = AT_ROWS + 4 * ROWS,
                       AT_BARRIERS = AT_QUEUE + QUEUE * 32, BYTES = AT_BARRIERS + 16 * (STAGES + QUEUE);

  static __device__ u32 tokens(u32 base, int stage) { return base + stage * TOKENS; }
  static __device__ u32 weights(u32 base, int stage) { return base + AT_WEIGHTS + stage * WEIGHTS; }
  static __device__ u32 scales(u32 base, int stage) { return base + AT_SCALES + stage * 2 * HALF_SCALES; }
  static __device__ u32 zeros(u32 base, int stage) { return base + AT_ZEROS + stage * 2 * ZEROS_STEP; }
  static __device__ u32 full(u32 base, int stage) { return base + AT_BARRIERS + 8 * stage; }
  static __device__ u32 empty(u32 base, int stage) { return full(base, STAGES + stage); }
  static __device__ u32 item(u32 base, int place) { return base + AT_QUEUE + 32 * place; }
  static __device__ u32 item_there(u32 base, int place) { return full(base, 2 * STAGES + place); }
  static __device__ u32 item_read(u32 base, int place) { return full(base, 2 * STAGES + QUEUE + place); }
};

template <int SIZE>
struct Turn {  // a place in a ring, and the parity of its round
  int at = 0;
  u32 parity = 0;
  __device__ __forceinline__ void next() {
    if (++at == SIZE) at = 0, parity ^= 1;
  }
  template <int COUNT>  // at most SIZE
  __device__ __forceinline__ void skip() {
    if ((at += COUNT) >= SIZE) at -= SIZE, parity ^= 1;
  }
  // It is the same in all lanes of a warp, which the assembler does not see. Told so, it keeps addresses in uniform registers.
  __device__ __forceinline__ void tell_uniform() { at = __shfl_sync(~0u, at, 0), parity = __shfl_sync(~0u, parity, 0); }
};

__device__ __forceinline__ void init_barrier(u32 barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}

__device__ __forceinline__ void arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void arrive_expecting(u32 barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ void wait(u32 barrier, u32 parity) {
  asm volatile(
      "{\n"
      ".reg .pred there;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 there, [%0], %1;\n"
      "@there bra done;\n"
      "bra again;\n"
      "done:\n"
      "}" ::"r"(barrier), "r"(parity) : "memory");
}

// A box of a matrix at (column, row) into shared memory, counted by a barrier.
__device__ __forceinline__ void copy_box(u32 to, const TensorMap& map, int column, int row, u32 barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(to),
      "l"(&map), "r"(column), "r"(row), "r"(barrier) : "memory");
}

__device__ __forceinline__ bool elect_one() {  // one lane of a whole warp, in a way that the assembler sees
  u32 chosen;
  asm volatile("{ .reg .pred p; elect.sync _|p, 0xffffffff; selp.u32 %0, 1, 0, p; }" : "=r"(chosen));
  return chosen;
}

template <int LEFT>  // all but the last LEFT committed groups of this thread
__device__ __forceinline__ void wait_for_older_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
}

template <class V>
__device__ __forceinline__ V load_shared(u32 address);
template <>
__device__ __forceinline__ u32 load_shared(u32 address) {
  u32 v;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(address) : "memory");
  return v;
}
template <>
__device__ __forceinline__ uint2 load_shared(u32 address) {
  uint2 v;
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(address) : "memory");
  return v;
}
template <>
__device__ __forceinline__ uint4 load_shared(u32 address) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(address)
               : "memory");
  return v;
}

__device__ __forceinline__ void store_shared(u32 address, uint4 v) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
