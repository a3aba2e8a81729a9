// Scales and zero points, checkpoint layout -> Marlin layout, for which kernels/layout.py has the orders.
// Host side: repack/native/cuda_repack.py. Strides count elements.
typedef unsigned int u32;
typedef unsigned short u16;
typedef long long i64;

constexpr int THREADS = 256;

// Where column n of 64 goes: the order of grouped scales, else of single ones. Both are their own inverse.
template <bool GROUPED>
__device__ __forceinline__ int position_of(int n) {
  return GROUPED ? n % 8 * 8 + n / 8 : (n & 32) | n / 2 % 4 * 8 | n / 8 % 4 * 2 | (n & 1);
}

// scales [B, columns, groups] -> [B, groups, columns] in Marlin order, 64 columns x up to 64 groups a block.
template <class Element, bool GROUPED>
__global__ void __launch_bounds__(THREADS)
    permute_scales(const Element* source, i64 source_expert, i64 source_column, i64 source_group, Element* out,
                   i64 out_expert, i64 out_group, int columns, int groups) {
  __shared__ Element tile[64][65];
  int steps = (groups + 63) / 64, rest = blockIdx.x / steps;
  int first = blockIdx.x % steps * 64, c = rest % (columns / 64), expert = rest / (columns / 64);
  int width = groups - first < 64 ? groups - first : 64;
  source += expert * source_expert + 64LL * c * source_column + first * source_group;
  out += expert * out_expert + 64LL * c + first * out_group;
  for (int i = threadIdx.x; i < 64 * width; i += THREADS) {
    int n = i / width, g = i % width;
    tile[g][position_of<GROUPED>(n)] = source[n * source_column + g * source_group];
  }
  __syncthreads();
  for (int i = threadIdx.x; i < 64 * width; i += THREADS) out[i / 64 * out_group + i % 64] = tile[i / 64][i % 64];
}

// zero points [B, columns * BITS / 32, groups], packed along columns -> [B, groups, columns * BITS / 32]: columns in the
// order of grouped scales, then within a word's worth of 8 (4) values the even ones before the odd ones.
template <int BITS>
__global__ void __launch_bounds__(THREADS)
    pack_zero_points(const u32* source, i64 source_expert, i64 source_word, i64 source_group, u32* out, i64 out_expert,
                     i64 out_group, i64 total, int columns, int groups) {
  constexpr int FIELDS = 32 / BITS, MASK = (1 << BITS) - 1;
  int words = columns / FIELDS;
  i64 i = static_cast<i64>(blockIdx.x) * THREADS + threadIdx.x;
  if (i >= total) return;
  int word = i % words, group = i / words % groups;
  i64 expert = i / words / groups;
  source += expert * source_expert + group * source_group;
  u32 packed = 0;
#pragma unroll
  for (int field = 0; field < FIELDS; ++field) {
    int from = word * FIELDS + (field < FIELDS / 2 ? 2 * field : 2 * field - FIELDS + 1);  // position in scale order
    int column = from / 64 * 64 + position_of<true>(from % 64);
    packed |= (source[column / FIELDS * source_word] >> (column % FIELDS * BITS) & MASK) << (field * BITS);
  }
  out[expert * out_expert + group * out_group + word] = packed;
}
