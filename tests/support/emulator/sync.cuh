// Barriers of a part of a block, on a CPU.
#pragma once
#include "runtime.h"

template <int ID, int THREADS>
inline void sync_threads_of() { emulator::meet(emulator::block->barriers[ID], THREADS); }
