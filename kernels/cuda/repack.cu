// Checkpoint layout <-> Marlin layout, as the drawing in kernels/layout.py has it: every word is read and written
// once, in pieces of at least 128 bytes. Host side: repack/native/cuda_repack.py. Strides count elements.
//
// The constant TILES comes from the build: tiles along K that one block has in flight.
typedef unsigned int u32;
typedef long long i64;

constexpr int THREADS = 256;
constexpr u32 LOW_NIBBLES = 0x0F0F0F0F;

// A tile is 64 columns x 32 words (128 bytes) of each. Thread (q, j, quad) holds words 4 quad .. 4 quad + 3 of the
// columns 16 j + q and 16 j + q + 8; the same 8 words in Marlin order are its part of the four lanes 4 q .. 4 q + 3.
//
//                4 bits                             8 bits
//   quad         Marlin rows 2 quad, 2 quad + 1     Marlin row quad
//   its words    16 q + 4 m + j, m = 0..3           32 q + 8 m + 2 j, and + 1
//
// In shared memory rows lie STRIDE = 4 mod 32 words apart, the odd rows of 4 bits behind all even ones; so the 32
// threads of a warp (one q) touch 32 banks.
template <int BITS>
struct Tile {
  static constexpr int WORDS = 32, ROW_WORDS = 32 * BITS, COLUMN_WORDS = BITS / 2, ROWS = WORDS / COLUMN_WORDS;
  static constexpr int STRIDE = ROW_WORDS + 4, ROW_VECTORS = ROW_WORDS / 4, VECTORS = ROWS * ROW_VECTORS;
  static __device__ int row_of(int slot) { return BITS == 4 ? 2 * (slot % 8) + slot / 8 : slot; }
};

struct Place {  // of a thread in its tile
  int quad, j, q;
  __device__ Place() : quad(threadIdx.x % 8), j(threadIdx.x / 8 % 4), q(threadIdx.x / 32) {}
};

template <int TILE_COUNT>
struct Block {  // which tiles a thread block has: columns 64 c .., the words of tile k, k + 1, .. TILE_COUNT
  int k, c, expert;
  __device__ Block(int columns, int words) {
    int steps = (words + 32 * TILE_COUNT - 1) / (32 * TILE_COUNT), rest = blockIdx.x / steps;
    k = blockIdx.x % steps * TILE_COUNT;
    c = rest % (columns / 64);
    expert = rest / (columns / 64);
  }
};

template <bool VECTOR>
__device__ __forceinline__ uint4 load(const u32* line, int at, int end) {  // 4 words, zeros from `end` on
  uint4 v = make_uint4(0, 0, 0, 0);
  if (VECTOR) {
    if (at < end) v = *reinterpret_cast<const uint4*>(line + at);
  } else {
    if (at < end) v.x = line[at];
    if (at + 1 < end) v.y = line[at + 1];
    if (at + 2 < end) v.z = line[at + 2];
    if (at + 3 < end) v.w = line[at + 3];
  }
  return v;
}

template <bool VECTOR>
__device__ __forceinline__ void store(u32* line, int at, int end, uint4 v) {
  if (VECTOR) {
    if (at < end) *reinterpret_cast<uint4*>(line + at) = v;
  } else {
    if (at < end) line[at] = v.x;
    if (at + 1 < end) line[at + 1] = v.y;
    if (at + 2 < end) line[at + 2] = v.z;
    if (at + 3 < end) line[at + 3] = v.w;
  }
}

// Two words of a column (k 0..7, k 8..15) -> its low nibbles (k, k + 8 in byte k/2) and its high ones. Its own inverse.
__device__ __forceinline__ void split_nibbles(u32& first, u32& second) {
  u32 low = (first & LOW_NIBBLES) | (second << 4 & ~LOW_NIBBLES);
  second = (first >> 4 & LOW_NIBBLES) | (second & ~LOW_NIBBLES);
  first = low;
}

// Byte m of a, b, c, d -> bytes 0..3 of word m. Its own inverse.
__device__ __forceinline__ void transpose_bytes(u32& a, u32& b, u32& c, u32& d) {
  u32 ab = __byte_perm(a, b, 0x5140), cd = __byte_perm(c, d, 0x5140);
  u32 ab_high = __byte_perm(a, b, 0x7362), cd_high = __byte_perm(c, d, 0x7362);
  a = __byte_perm(ab, cd, 0x5410);
  b = __byte_perm(ab, cd, 0x7632);
  c = __byte_perm(ab_high, cd_high, 0x5410);
  d = __byte_perm(ab_high, cd_high, 0x7632);
}

// A column's words x .. w <-> the bytes k0, k0 + 8, k0 + 1, k0 + 9 of lanes 0..3 (8 bits).
__device__ __forceinline__ uint4 pair_bytes(uint4 v) {
  return make_uint4(__byte_perm(v.x, v.z, 0x5140), __byte_perm(v.x, v.z, 0x7362), __byte_perm(v.y, v.w, 0x5140),
                    __byte_perm(v.y, v.w, 0x7362));
}

__device__ __forceinline__ uint4 unpair_bytes(uint4 v) {
  return make_uint4(__byte_perm(v.x, v.y, 0x6420), __byte_perm(v.z, v.w, 0x6420), __byte_perm(v.x, v.y, 0x7531),
                    __byte_perm(v.z, v.w, 0x7531));
}

// The thread's words of column n and of column n + 8 into the tile in Marlin order.
template <int BITS>
__device__ __forceinline__ void put(u32* tile, Place at, uint4 n, uint4 n8) {
  constexpr int STRIDE = Tile<BITS>::STRIDE;
  u32* row = tile + at.quad * STRIDE;
  if (BITS == 4) {
    u32* lanes = row + 16 * at.q + at.j;
    split_nibbles(n.x, n.y), split_nibbles(n.z, n.w), split_nibbles(n8.x, n8.y), split_nibbles(n8.z, n8.w);
    transpose_bytes(n.x, n8.x, n.y, n8.y);
    transpose_bytes(n.z, n8.z, n.w, n8.w);
    lanes[0] = n.x, lanes[4] = n8.x, lanes[8] = n.y, lanes[12] = n8.y;
    lanes += 8 * STRIDE;
    lanes[0] = n.z, lanes[4] = n8.z, lanes[8] = n.w, lanes[12] = n8.w;
  } else {
    uint2* lanes = reinterpret_cast<uint2*>(row + 32 * at.q + 2 * at.j);
    n = pair_bytes(n), n8 = pair_bytes(n8);
    lanes[0] = make_uint2(n.x, n8.x), lanes[4] = make_uint2(n.y, n8.y);
    lanes[8] = make_uint2(n.z, n8.z), lanes[12] = make_uint2(n.w, n8.w);
  }
}

// The inverse: the thread's words of both columns out of a tile in Marlin order.
template <int BITS>
__device__ __forceinline__ void get(const u32* tile, Place at, uint4& n, uint4& n8) {
  constexpr int STRIDE = Tile<BITS>::STRIDE;
  const u32* row = tile + at.quad * STRIDE;
  if (BITS == 4) {
    const u32* lanes = row + 16 * at.q + at.j;
    n.x = lanes[0], n8.x = lanes[4], n.y = lanes[8], n8.y = lanes[12];
    lanes += 8 * STRIDE;
    n.z = lanes[0], n8.z = lanes[4], n.w = lanes[8], n8.w = lanes[12];
    transpose_bytes(n.x, n8.x, n.y, n8.y);
    transpose_bytes(n.z, n8.z, n.w, n8.w);
    split_nibbles(n.x, n.y), split_nibbles(n.z, n.w), split_nibbles(n8.x, n8.y), split_nibbles(n8.z, n8.w);
  } else {
    const uint2* lanes = reinterpret_cast<const uint2*>(row + 32 * at.q + 2 * at.j);
    uint2 m0 = lanes[0], m1 = lanes[4], m2 = lanes[8], m3 = lanes[12];
    n = unpair_bytes(make_uint4(m0.x, m1.x, m2.x, m3.x));
    n8 = unpair_bytes(make_uint4(m0.y, m1.y, m2.y, m3.y));
  }
}

// packed [B, columns, words] -> qweight [B, words * 2 / BITS, columns * BITS / 2].
template <int BITS, bool VECTOR>
__global__ void __launch_bounds__(THREADS)
    pack_qweight(const u32* packed, i64 packed_expert, i64 packed_column, u32* qweight, i64 qweight_expert,
                 i64 qweight_row, int columns, int words) {
  typedef Tile<BITS> T;
  __shared__ uint4 shared[TILES * T::ROWS * T::STRIDE / 4];
  u32* tiles = reinterpret_cast<u32*>(shared);
  Block<TILES> block(columns, words);
  Place at;
  const u32* column = packed + block.expert * packed_expert + (64LL * block.c + 16 * at.j + at.q) * packed_column;
  uint4 n[TILES], n8[TILES];
#pragma unroll
  for (int t = 0; t < TILES; ++t) {
    int word = (block.k + t) * T::WORDS + 4 * at.quad;
    n[t] = load<VECTOR>(column, word, words);
    n8[t] = load<VECTOR>(column + 8 * packed_column, word, words);
  }
#pragma unroll
  for (int t = 0; t < TILES; ++t) put<BITS>(tiles + t * T::ROWS * T::STRIDE, at, n[t], n8[t]);
  __syncthreads();
  u32* out = qweight + block.expert * qweight_expert + static_cast<i64>(block.c) * T::ROW_WORDS;
#pragma unroll
  for (int part = 0; part < TILES * T::VECTORS / THREADS; ++part) {
    int i = threadIdx.x + part * THREADS;
    int slot = i % T::VECTORS / T::ROW_VECTORS, t = i / T::VECTORS, word = i % T::ROW_VECTORS * 4;
    i64 row = (block.k + t) * T::ROWS + T::row_of(slot);
    if (row >= words / T::COLUMN_WORDS) continue;
    uint4 v = *reinterpret_cast<uint4*>(tiles + (t * T::ROWS + slot) * T::STRIDE + word);
    store<VECTOR>(out + row * qweight_row, word, T::ROW_WORDS, v);
  }
}

// The inverse of pack_qweight.
template <int BITS, bool VECTOR>
__global__ void __launch_bounds__(THREADS)
    unpack_qweight(u32* packed, i64 packed_expert, i64 packed_column, const u32* qweight, i64 qweight_expert,
                   i64 qweight_row, int columns, int words) {
  typedef Tile<BITS> T;
  constexpr int VECTORS = TILES * T::VECTORS / THREADS;  // of a thread
  __shared__ uint4 shared[TILES * T::ROWS * T::STRIDE / 4];
  u32* tiles = reinterpret_cast<u32*>(shared);
  Block<TILES> block(columns, words);
  Place at;
  const u32* source = qweight + block.expert * qweight_expert + static_cast<i64>(block.c) * T::ROW_WORDS;
  uint4 v[VECTORS];
#pragma unroll
  for (int part = 0; part < VECTORS; ++part) {
    int i = threadIdx.x + part * THREADS;
    int slot = i % T::VECTORS / T::ROW_VECTORS, t = i / T::VECTORS, word = i % T::ROW_VECTORS * 4;
    i64 row = (block.k + t) * T::ROWS + T::row_of(slot);
    int end = row < words / T::COLUMN_WORDS ? T::ROW_WORDS : 0;
    v[part] = load<VECTOR>(source + row * qweight_row, word, end);
  }
#pragma unroll
  for (int part = 0; part < VECTORS; ++part) {
    int i = threadIdx.x + part * THREADS;
    int slot = i % T::VECTORS / T::ROW_VECTORS, t = i / T::VECTORS, word = i % T::ROW_VECTORS * 4;
    *reinterpret_cast<uint4*>(tiles + (t * T::ROWS + slot) * T::STRIDE + word) = v[part];
  }
  __syncthreads();
  u32* column = packed + block.expert * packed_expert + (64LL * block.c + 16 * at.j + at.q) * packed_column;
#pragma unroll
  for (int t = 0; t < TILES; ++t) {
    int word = (block.k + t) * T::WORDS + 4 * at.quad;
    uint4 n, n8;
    get<BITS>(tiles + t * T::ROWS * T::STRIDE, at, n, n8);
    store<VECTOR>(column, word, words, n);
    store<VECTOR>(column + 8 * packed_column, word, words, n8);
  }
}
