// Copies to a stage and its barriers, on a CPU: a copy is made some time later, and counts itself off the barrier then.
#pragma once
#include "load.cuh"

constexpr int FULL_ARRIVALS = 1;

struct StageBarrier { unsigned short count, pending; unsigned char phase, unused[3]; };
static_assert(sizeof(StageBarrier) == sizeof(u64));

struct StageState {  // bytes that a barrier still waits for, by its address
  static int& bytes(u64* barrier) {
    static thread_local std::vector<std::pair<u64*, int>> all;
    for (auto& entry : all)
      if (entry.first == barrier) return entry.second;
    all.emplace_back(barrier, 0);
    return all.back().second;
  }
};

inline void settle(u64* barrier) {
  StageBarrier& state = *reinterpret_cast<StageBarrier*>(barrier);
  if (state.pending == 0 && StageState::bytes(barrier) == 0) state.phase ^= 1, state.pending = state.count;
}

inline void init_barrier(u64* barrier, int arrivals) {
  *reinterpret_cast<StageBarrier*>(barrier) = {static_cast<unsigned short>(arrivals), static_cast<unsigned short>(arrivals), 0, {}};
  StageState::bytes(barrier) = 0;
}

inline void publish_barriers() {}

inline void arrive(u64* barrier) {
  reinterpret_cast<StageBarrier*>(barrier)->pending--;
  settle(barrier);
}

inline void wait_for(u64* barrier, u32 parity) {
  emulator::wait_until([=] { return reinterpret_cast<StageBarrier*>(barrier)->phase != parity; });
}

struct StageCopy {
  u64* full;
  StageCopy(u64* full, u32 bytes) : full(full) {
    if (threadIdx.x & 31) return;
    StageState::bytes(full) += bytes;
    arrive(full);
  }
  void copy(char* to, const char* from, u32 bytes) const {
    if (threadIdx.x & 31) return;
    bool aligned = bytes % 16 == 0 && reinterpret_cast<size_t>(to) % 16 == 0 && reinterpret_cast<size_t>(from) % 16 == 0;
    if (!aligned) emulator::wait_until([] { return false; });  // a GPU's copy would fail
    u64* barrier = full;
    memset(to, 0xff, bytes);
    emulator::block->copies.push_back([=] {
      memcpy(to, from, bytes);
      StageState::bytes(barrier) -= bytes;
      settle(barrier);
    });
  }
  void done() const {}
};
