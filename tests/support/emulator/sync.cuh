// Barriers of a part of a block, on a CPU.
#pragma once
#include "runtime.h"

template <int THREADS>
inline void sync_threads_of(int id) { emulator::meet(emulator::block->barriers[id], THREADS); }

inline void fence_device() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
