// Enough of CUDA to run a kernel's source on a CPU: a block is 256 threads with a barrier, blocks run in turn.
#pragma once
#include <barrier>
#include <functional>
#include <thread>
#include <vector>

#define __global__
#define __device__
#define __shared__ static
#define __forceinline__ inline
#define __launch_bounds__(threads)

struct Index { int x; };
struct uint2 { unsigned int x, y; };
struct alignas(16) uint4 { unsigned int x, y, z, w; };
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

inline unsigned __byte_perm(unsigned low, unsigned high, unsigned selector) {
  unsigned long long bytes = static_cast<unsigned long long>(high) << 32 | low;
  unsigned out = 0;
  for (int i = 0; i < 4; ++i) out |= static_cast<unsigned>(bytes >> 8 * (selector >> 4 * i & 7) & 255) << 8 * i;
  return out;
}

constexpr int BLOCK_THREADS = 256;
inline thread_local Index threadIdx, blockIdx;
inline std::barrier<>& block_barrier() {
  static std::barrier<> barrier(BLOCK_THREADS);
  return barrier;
}
inline void __syncthreads() { block_barrier().arrive_and_wait(); }

inline void run_blocks(int blocks, const std::function<void()>& kernel) {
  std::vector<std::thread> threads;
  for (int thread = 0; thread < BLOCK_THREADS; ++thread)
    threads.emplace_back([&, thread] {
      threadIdx.x = thread;
      for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x) {
        kernel();
        __syncthreads();
      }
    });
  for (auto& thread : threads) thread.join();
}
