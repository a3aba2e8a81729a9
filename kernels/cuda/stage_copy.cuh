// Bytes from memory to a stage, and the barriers that say when a stage is full or empty.
// sm_90 and up: one lane starts bulk copies, which count themselves off the barrier. Before: a warp copies 16 bytes
// a lane, and the barrier takes its arrivals when they are there.
#pragma once
#include "load.cuh"

__device__ __forceinline__ void init_barrier(u64* barrier, int arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals));
}

// Bulk copies see the barriers that this thread has made, once the block has met.
__device__ __forceinline__ void publish_barriers() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}

__device__ __forceinline__ void arrive(u64* barrier) {
  asm volatile("{ .reg .b64 t; mbarrier.arrive.shared.b64 t, [%0]; }" ::"r"(shared_address(barrier)) : "memory");
}

// Until the barrier has completed the phase of this parity.
__device__ __forceinline__ void wait_for(u64* barrier, u32 parity) {
  u32 done, address = shared_address(barrier);
  do {
#if __CUDA_ARCH__ >= 900
    asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                 : "=r"(done) : "r"(address), "r"(parity) : "memory");
#else
    asm volatile("{ .reg .pred p; mbarrier.test_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                 : "=r"(done) : "r"(address), "r"(parity) : "memory");
#endif
  } while (!done);
}

#if __CUDA_ARCH__ >= 900
constexpr int FULL_ARRIVALS = 1;
#else
constexpr int FULL_ARRIVALS = 32;
#endif

struct StageCopy {  // one stage's copies; a whole warp calls all of it
  u64* full;
  u64 policy;
  __device__ __forceinline__ StageCopy(u64* full, u32 bytes) : full(full) {
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));  // weights are read once
#if __CUDA_ARCH__ >= 900
    if ((threadIdx.x & 31) == 0)
      asm volatile("{ .reg .b64 t; mbarrier.arrive.expect_tx.shared.b64 t, [%0], %1; }" ::"r"(shared_address(full)), "r"(bytes) : "memory");
#endif
  }

  // `bytes` is a multiple of 16, and so are the addresses.
  __device__ __forceinline__ void copy(char* to, const char* from, u32 bytes) const {
#if __CUDA_ARCH__ >= 900
    if ((threadIdx.x & 31) == 0)
      asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(
                       shared_address(to)), "l"(from), "r"(bytes), "r"(shared_address(full)), "l"(policy) : "memory");
#else
    for (u32 i = (threadIdx.x & 31) * 16; i < bytes; i += 512)
      asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(shared_address(to + i)), "l"(from + i), "l"(policy));
#endif
  }

  __device__ __forceinline__ void done() const {
#if __CUDA_ARCH__ < 900
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(shared_address(full)) : "memory");
#endif
  }
};
