// Barriers of a part of a block.
#pragma once

// Barrier `ID` (1 to 15) of THREADS threads, whole warps of them.
template <int ID, int THREADS>
__device__ __forceinline__ void sync_threads_of() {
  asm volatile("bar.sync %0, %1;" ::"n"(ID), "n"(THREADS) : "memory");
}
