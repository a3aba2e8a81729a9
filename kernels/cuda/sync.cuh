// Barriers of a part of a block, and between kernels.
#pragma once

// Barrier `ID` (1 to 15) of THREADS threads, whole warps of them.
template <int ID, int THREADS>
__device__ __forceinline__ void sync_threads_of() {
  asm volatile("bar.sync %0, %1;" ::"n"(ID), "n"(THREADS) : "memory");
}

// A kernel that is launched as programmatic (kernels/jit/launch.py) calls this before it reads or writes any global
// memory: its blocks come while the stream's kernel before ends, and from here on all that one wrote is there. Others
// that are launched so may come as soon as this one's blocks make room.
__device__ __forceinline__ void wait_for_kernel_before() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
