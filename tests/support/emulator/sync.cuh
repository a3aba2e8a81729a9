// Barriers of a part of a block, on a CPU, where one kernel runs at a time.
#pragma once
#include "runtime.h"

template <int ID, int THREADS>
inline void sync_threads_of() { emulator::meet(emulator::block->barriers[ID], THREADS); }

inline void wait_for_kernel_before() {}
