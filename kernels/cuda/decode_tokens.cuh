// Tokens of GEMM 1, a chunk of inputs at a time: 16 bytes a thread, fetched into registers one chunk ahead of their
// use and then put into shared memory.
#pragma once
#include "decode_work.cuh"

struct TokenChunk {
  static constexpr int VECTORS = CHUNK_K / 8;  // of a row
  uint4 vector;

  // Inputs of the chunk that starts at a slot of GEMM 1, of as many rows as the tile has.
  __device__ __forceinline__ void fetch(const MoEArgs& args, const Routes& routes, u32 granule) {
    RowTile tile = routes.tiles[granule / SLOTS1 / STRIPS];
    int r = threadIdx.x / VECTORS, element = granule % SLOTS1 * Slot<W13>::K + threadIdx.x % VECTORS * 8;
    if (r >= tile.rows || element >= HIDDEN) return;
    const Scalar* row = static_cast<const Scalar*>(args.x) + routes.slot_of_row[tile.row + r] / args.top_k * args.x_stride;
    if (!W13_SORTED) {
      vector = __ldg(reinterpret_cast<const uint4*>(row + element));
      return;
    }
    const int* order = args.w13.sort_order + static_cast<u64>(tile.expert) * HIDDEN + element;
    alignas(16) Scalar gathered[8];
#pragma unroll
    for (int i = 0; i < 8; i++) gathered[i] = row[order[i]];
    vector = *reinterpret_cast<const uint4*>(gathered);
  }

  __device__ __forceinline__ void put(Scalar* buffer) const {
    *reinterpret_cast<uint4*>(buffer + threadIdx.x / VECTORS * CHUNK_ROW + threadIdx.x % VECTORS * 8) = vector;
  }
};
