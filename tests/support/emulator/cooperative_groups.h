// The grid's barrier: a block's threads meet, and the last of them meets those of the other blocks.
#pragma once
#include "runtime.h"

namespace cooperative_groups {
struct Grid {
  void sync() const {
    emulator::meet(emulator::block->barriers[15], blockDim.x, [] { emulator::block->others->meet(); });
  }
  // Some blocks meet the others when they arrive, some when they wait.
  bool barrier_arrive() const {
    bool early = emulator::block->early;
    if (early) sync();
    return early;
  }
  void barrier_wait(bool early) const {
    if (!early) sync();
  }
};
inline Grid this_grid() { return {}; }
}  // namespace cooperative_groups
