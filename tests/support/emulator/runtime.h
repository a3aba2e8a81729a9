// A grid of blocks on a CPU: a block is an OS thread, its threads are fibers that take turns in random order, and
// whole warps miss some.
//
// What a GPU's threads do together (barriers, shuffles, mma) is a place where a fiber waits until the others have come.
// Copies that a GPU makes in the background lie in a list, and one of them is made now and then. So code that reads too
// early, or waits for what never comes, is found: it reads poison, or the block stands still and says so.
#pragma once
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

#define __global__
#define __device__
#define __shared__ static thread_local
#define __grid_constant__
#define __forceinline__ inline
#define __launch_bounds__(...)
#undef __noinline__
#define __noinline__ __attribute__((noinline))

struct Index { unsigned x; };
struct uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(16) float4 { float x, y, z, w; };
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
using std::max;
using std::min;
inline int max(int a, unsigned b) { return a > static_cast<int>(b) ? a : static_cast<int>(b); }

namespace emulator {

constexpr size_t STACK_BYTES = 256 << 10;

struct Fiber {
  ucontext_t context;
  std::unique_ptr<char[]> stack;
  Index thread;
  bool done = false;
  std::function<bool()> ready;  // what it waits for, or nothing
};

struct Warp {
  unsigned arrived = 0, generation = 0, asleep = 0;  // rounds of the scheduler that it misses
  alignas(16) char values[2][32][64];
};

struct Barrier {
  unsigned arrived = 0, generation = 0;
};

// Where the blocks of a grid meet, until one of them stands still.
struct GridBarrier {
  unsigned blocks, arrived = 0, generation = 0;
  bool broken = false;
  std::mutex mutex;
  std::condition_variable changed;
  void meet() {
    std::unique_lock lock(mutex);
    unsigned mine = generation;
    if (++arrived == blocks)
      arrived = 0, generation++, changed.notify_all();
    else
      changed.wait(lock, [&] { return broken || generation != mine; });
  }
  void give_up() {
    std::unique_lock lock(mutex);
    broken = true, changed.notify_all();
  }
};

struct Block {
  Index index, size, grid;
  std::vector<Fiber> fibers;
  std::vector<Warp> warps;
  Barrier barriers[16];
  std::vector<std::function<void()>> copies;
  GridBarrier* others;
  char* shared;
  bool early;  // whether it meets other blocks as soon as it may
  std::mt19937 random;
  ucontext_t scheduler;
};

inline thread_local Block* block;
inline thread_local Fiber* current;
inline std::function<void()> kernel;

inline void wait_until(std::function<bool()> ready) {
  if (ready()) return;
  current->ready = std::move(ready);
  swapcontext(&current->context, &block->scheduler);
}

inline void run_fiber() {
  kernel();
  current->done = true;
  swapcontext(&current->context, &block->scheduler);
}

// `count` threads meet at a barrier; the last one does `last` before all go on.
inline void meet(Barrier& barrier, unsigned count, const std::function<void()>& last = [] {}) {
  unsigned generation = barrier.generation;
  if (++barrier.arrived == count) {
    last();
    barrier.arrived = 0, barrier.generation++;
  } else {
    wait_until([&barrier, generation] { return barrier.generation != generation; });
  }
}

// Each of a warp's lanes gives a value; all of them, once all have come.
template <class V>
const V* exchange(const V& mine) {
  static_assert(sizeof(V) <= 64);
  Warp& warp = block->warps[current->thread.x / 32];
  unsigned generation = warp.generation;
  memcpy(warp.values[generation & 1][current->thread.x % 32], &mine, sizeof(V));
  if (++warp.arrived == 32)
    warp.arrived = 0, warp.generation++;
  else
    wait_until([&warp, generation] { return warp.generation != generation; });
  // 64 bytes a lane
  static thread_local V out[32 * 64];
  V* mine_out = out + current->thread.x % 32 * 32;
  for (int lane = 0; lane < 32; lane++) memcpy(&mine_out[lane], warp.values[generation & 1][lane], sizeof(V));
  return mine_out;
}

// Until every fiber has ended; false where none can go on.
inline bool run_block() {
  std::vector<int> order(block->fibers.size());
  for (size_t i = 0; i < order.size(); i++) order[i] = i;
  for (;;) {
    std::shuffle(order.begin(), order.end(), block->random);
    bool moved = false, left = false;
    for (Warp& warp : block->warps)  // so that warps fall far behind each other
      if (warp.asleep > 0)
        warp.asleep--;
      else if (block->random() % 512 == 0)
        warp.asleep = block->random() % 64;
    for (int i : order) {
      Fiber& fiber = block->fibers[i];
      if (fiber.done) continue;
      left = true;
      if (block->warps[i / 32].asleep > 0) {
        moved = true;
        continue;
      }
      if (fiber.ready && !fiber.ready()) continue;
      fiber.ready = nullptr;
      moved = true, current = &fiber;
      swapcontext(&block->scheduler, &fiber.context);
    }
    if (!left) return true;
    auto& copies = block->copies;
    for (size_t some = block->random() % (copies.size() + 1) + !moved; some > 0 && !copies.empty(); some--) {
      size_t which = block->random() % copies.size();
      std::function<void()> copy = std::move(copies[which]);
      copies.erase(copies.begin() + which);
      copy();
      moved = true;
    }
    if (!moved || block->others->broken) return false;
  }
}

enum Outcome { RIGHT = 0, STANDS_STILL = 1, WROTE_TOO_FAR = 2 };

// Runs `entry` as a kernel; the last bytes that it may use of a block's shared memory are guarded.
inline Outcome run_grid(unsigned grid, unsigned threads, size_t shared_bytes, unsigned seed, std::function<void()> entry) {
  kernel = std::move(entry);
  GridBarrier others{grid};
  std::vector<std::thread> running;
  std::vector<Outcome> outcomes(grid, RIGHT);
  for (unsigned b = 0; b < grid; b++)
    running.emplace_back([&, b] {
      Block mine;
      constexpr size_t GUARD = 1024;
      std::unique_ptr<char[]> shared(new char[shared_bytes + 2 * GUARD]);
      char* aligned = reinterpret_cast<char*>((reinterpret_cast<size_t>(shared.get()) + 1023) / 1024 * 1024);
      memset(aligned, 0xff, shared_bytes + GUARD);
      mine.index = {b}, mine.size = {threads}, mine.grid = {grid}, mine.others = &others, mine.shared = aligned;
      mine.random.seed(seed * 1000 + b);
      mine.early = mine.random() & 1;
      mine.warps.resize(threads / 32);
      mine.fibers.resize(threads);
      block = &mine;
      for (unsigned t = 0; t < threads; t++) {
        Fiber& fiber = mine.fibers[t];
        fiber.thread = {t};
        fiber.stack.reset(new char[STACK_BYTES]);
        getcontext(&fiber.context);
        fiber.context.uc_stack.ss_sp = fiber.stack.get(), fiber.context.uc_stack.ss_size = STACK_BYTES;
        makecontext(&fiber.context, run_fiber, 0);
      }
      if (!run_block()) outcomes[b] = STANDS_STILL, others.give_up();
      for (size_t i = 0; i < GUARD; i++)
        if (static_cast<unsigned char>(aligned[shared_bytes + i]) != 0xff) outcomes[b] = WROTE_TOO_FAR;
    });
  for (auto& thread : running) thread.join();
  return *std::max_element(outcomes.begin(), outcomes.end());
}

}  // namespace emulator

#define threadIdx (emulator::current->thread)
#define blockIdx (emulator::block->index)
#define blockDim (emulator::block->size)
#define gridDim (emulator::block->grid)

inline uint4* dynamic_shared() { return reinterpret_cast<uint4*>(emulator::block->shared); }
inline void __syncthreads() { emulator::meet(emulator::block->barriers[0], blockDim.x); }
inline void __syncwarp() { emulator::exchange(0); }
template <class V>
V __shfl_sync(unsigned, V v, int lane) { return emulator::exchange(v)[lane & 31]; }
template <class V>
V __shfl_xor_sync(unsigned, V v, int d) { return emulator::exchange(v)[(threadIdx.x ^ d) & 31]; }
template <class V>
V __shfl_up_sync(unsigned, V v, int d) {
  int lane = threadIdx.x & 31;
  const V* all = emulator::exchange(v);
  return lane >= d ? all[lane - d] : v;
}
inline unsigned __ballot_sync(unsigned, bool v) {
  const bool* all = emulator::exchange(v);
  unsigned mask = 0;
  for (int lane = 0; lane < 32; lane++) mask |= static_cast<unsigned>(all[lane]) << lane;
  return mask;
}
inline unsigned __match_any_sync(unsigned, int v) {
  const int* all = emulator::exchange(v);
  unsigned mask = 0;
  for (int lane = 0; lane < 32; lane++) mask |= static_cast<unsigned>(all[lane] == v) << lane;
  return mask;
}
inline unsigned __reduce_min_sync(unsigned, unsigned v) {
  const unsigned* all = emulator::exchange(v);
  return *std::min_element(all, all + 32);
}
inline int __popc(unsigned v) { return __builtin_popcount(v); }
inline int __ffs(unsigned v) { return __builtin_ffs(v); }
inline unsigned __byte_perm(unsigned low, unsigned high, unsigned selector) {
  unsigned long long bytes = static_cast<unsigned long long>(high) << 32 | low;
  unsigned out = 0;
  for (int i = 0; i < 4; ++i) out |= static_cast<unsigned>(bytes >> 8 * (selector >> 4 * i & 7) & 255) << 8 * i;
  return out;
}
inline float __fdividef(float a, float b) { return a / b; }
inline float __uint_as_float(unsigned v) { float f; memcpy(&f, &v, 4); return f; }
template <class V>
V __ldg(const V* p) { return *p; }
template <class V>
V __ldcg(const V* p) { return *p; }
inline int atomicAdd(int* p, int v) { return __atomic_fetch_add(p, v, __ATOMIC_RELAXED); }
