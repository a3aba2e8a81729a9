// What the build fixes: types, sizes in slots and blocks, and where things lie in shared memory.
//
// The constants in capitals come from the build (kernels/plan/decode.py): those of moe.cu, and
//   HIDDEN, INTERMEDIATE   H and the padded I
//   TEAMS                  of a block: eight warps that share a ring of stages, and one that fills it
//   RING_STAGES            of a team
//   ACTIVATION_K           inputs of w2 that fit the shared memory for activations
#pragma once
#include "slot.cuh"
#include "sync.cuh"

typedef SixteenBits<FP16>::Type Type;
typedef Type::Scalar Scalar;
typedef Format<W13_BITS, W13_GROUP, W13_SYMMETRIC> W13;
typedef Format<W2_BITS, W2_GROUP, W2_SYMMETRIC> W2;

constexpr int WARPS = TEAMS * STAGE_BLOCKS, THREADS = 32 * WARPS;  // without the producers
constexpr int OCTETS = TOKEN_TILE / 8;
constexpr int SIZE_N1 = INTERMEDIATE * (GATED ? 2 : 1);                  // columns of w13
constexpr int SLOTS1 = HIDDEN / Slot<W13>::K, SLOTS2 = INTERMEDIATE / Slot<W2>::K;  // along K
constexpr int STRIP_COLUMNS = 64 * STAGE_BLOCKS / (GATED ? 2 : 1);       // of the activation
constexpr int STRIPS = (INTERMEDIATE + STRIP_COLUMNS - 1) / STRIP_COLUMNS, BLOCKS2 = HIDDEN / 64;
constexpr int GROUPS2 = (BLOCKS2 + STAGE_BLOCKS - 1) / STAGE_BLOCKS;

constexpr int CHUNK_K = 8 * THREADS / TOKEN_TILE, CHUNK_SLOTS = CHUNK_K / Slot<W13>::K;  // 16 bytes a thread
constexpr int CHUNK_ROW = CHUNK_K + 8, CHUNK_ELEMENTS = TOKEN_TILE * CHUNK_ROW;  // 16 bytes more against bank conflicts
constexpr int ACTIVATIONS_ELEMENTS = TOKEN_TILE * (ACTIVATION_K + 8);

// Where a block has so few slots of GEMM 1, the weights of GEMM 2 wait until those of GEMM 1 have arrived.
constexpr u32 HELD_BACK_SLOTS = 14;

// Shared memory: rings | two chunks of tokens | activations, or sums of the other teams | lists of the route.
// The route's counts lie where tokens and activations come later.
constexpr int STAGE_BYTES = Stage<W13>::BYTES > Stage<W2>::BYTES ? Stage<W13>::BYTES : Stage<W2>::BYTES;
constexpr int EXCHANGE_BYTES = (TEAMS - 1) * STAGE_BLOCKS * 2048;
constexpr int AT_TOKENS = TEAMS * RING_STAGES * STAGE_BYTES, AT_ACTIVATIONS = AT_TOKENS + 2 * CHUNK_ELEMENTS * 2;
constexpr int AT_LISTS = AT_ACTIVATIONS + (2 * ACTIVATIONS_ELEMENTS > EXCHANGE_BYTES ? 2 * ACTIVATIONS_ELEMENTS : EXCHANGE_BYTES);

// All warps but the producers.
__device__ __forceinline__ void sync_consumers() { sync_threads_of<1, THREADS>(); }
