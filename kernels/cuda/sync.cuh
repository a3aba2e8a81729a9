// Barriers of a part of a block, and order between blocks.
#pragma once

// Barrier `id` (1 to 15) of THREADS threads, whole warps of them.
template <int THREADS>
__device__ __forceinline__ void sync_threads_of(int id) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "n"(THREADS) : "memory");
}

// What this thread has seen or written before, others see before what it writes later.
__device__ __forceinline__ void fence_device() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }
