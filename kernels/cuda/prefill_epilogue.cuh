// Sums in registers -> activations (GEMM 1), or rows by slot (GEMM 2).
//
// Thread 4g + m of a warp has, of octet i of the tile's tokens, tokens 8i + 2m and 8i + 2m + 1 of the columns
// 16p + g (d[p][4i], d[p][4i + 1]) and 16p + g + 8 (d[p][4i + 2], d[p][4i + 3]) of the warp's 32, p = 0, 1.
// stmatrix turns eight tokens of them into rows of 64 bytes, which leave in pieces of 16.
#pragma once
#include "finish.cuh"
#include "prefill_activation.cuh"
#include "prefill_multiply.cuh"

constexpr int EXCHANGE_BYTES = 1024, OCTET_BYTES = 512;

// A thread's values of one octet, in the order of its sums: [piece][column g, g + 8][token 2m, 2m + 1].
struct Octet { float v[2][2][2]; };

// A finished sum: times its column's scale where the fragments were not scaled, plus the bias.
template <class Type, class F>
struct Finish {
  float factors[2][2], biases[2][2];
  __device__ __forceinline__ Finish(const MatrixArgs& matrix, int expert, int column, int size_n, int g) {
    typedef const typename Type::Scalar* Scalars;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      int n = column + 8 * i + g;
      u64 place = static_cast<u64>(expert) * size_n + single_order(n);
      bool there = n < size_n;
      factors[i >> 1][i & 1] = Type::SUM_FACTOR;
      if (!F::GROUP && there) factors[i >> 1][i & 1] *= Type::to_float(static_cast<Scalars>(matrix.scales)[place]);
      biases[i >> 1][i & 1] = matrix.bias && there ? Type::to_float(static_cast<Scalars>(matrix.bias)[place]) : 0.0f;
    }
  }
  // `weights` of the two tokens belong on the GEMM's input, which comes to the same.
  __device__ __forceinline__ void apply(Octet& octet, float2 weights) const {
#pragma unroll
    for (int p = 0; p < 2; p++)
#pragma unroll
      for (int c = 0; c < 2; c++) {
        octet.v[p][c][0] = octet.v[p][c][0] * (factors[p][c] * weights.x) + biases[p][c];
        octet.v[p][c][1] = octet.v[p][c][1] * (factors[p][c] * weights.y) + biases[p][c];
      }
  }
};

template <int T>
__device__ __forceinline__ Octet octet_of(const Sums<T>& sums, int i) {
  Octet octet;
#pragma unroll
  for (int p = 0; p < 2; p++)
#pragma unroll
    for (int c = 0; c < 4; c++) octet.v[p][c >> 1][c & 1] = sums.d[p][4 * i + c];
  return octet;
}

// Of the rows of a tile: slots and router weights, in shared memory.
struct Rows {
  u32 address;
  __device__ __forceinline__ void load(const RoutedRow* from, int rows, int thread) const {
    for (int r = thread; r < rows; r += 128)
      asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(address + 8 * r), "l"(from + r) : "memory");
    commit_copies();
  }
  __device__ __forceinline__ float2 weights(int i, int m) const {
    uint4 two = load_shared<uint4>(address + 64 * i + 16 * m);
    return make_float2(__uint_as_float(two.y), __uint_as_float(two.w));
  }
  __device__ __forceinline__ int slot(int row) const { return load_shared<u32>(address + 8 * row); }
};

__device__ __forceinline__ u32 staged(u32 buffer, int token, int piece) {  // conflict-free by rows and by pieces
  return buffer + token * 64 + ((piece ^ ((token >> 1) & 3)) << 4);
}

template <class Type>
__device__ __forceinline__ void put_octet(u32 buffer, const Octet& octet, int lane) {
  u32 r[4];
#pragma unroll
  for (int i = 0; i < 4; i++) r[i] = bits_of(Type::from_floats(octet.v[i >> 1][i & 1][0], octet.v[i >> 1][i & 1][1]));
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(staged(buffer, lane & 7, lane >> 3)),
               "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}

// All rows of a tile, the warp's 32 columns of each: octet i as `value(i)`, row r to `to(r)`.
template <class Type, int T, class Value, class To>
__device__ __forceinline__ void store_rows(int rows, u32 buffer, int lane, Value value, To to) {
  constexpr int AT_ONCE = 4;
#pragma unroll
  for (int start = 0; start < T / 8; start += AT_ONCE) {
    __syncwarp();
#pragma unroll
    for (int i = start; i < start + AT_ONCE && i < T / 8; i++) put_octet<Type>(buffer + (i - start) * OCTET_BYTES, value(i), lane);
    __syncwarp();
#pragma unroll
    for (int i = start; i < start + AT_ONCE && i < T / 8; i++) {
      int row = 8 * i + (lane >> 2);
      uint4 v = load_shared<uint4>(staged(buffer + (i - start) * OCTET_BYTES, lane >> 2, lane & 3));
      if (row < rows) *(to(row) + (lane & 3)) = v;
    }
  }
}

__device__ __forceinline__ void barrier(int name, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(name), "r"(threads) : "memory");
}

// Gate and up of the same columns are in two warps: of two octets the gate's warp finishes the first, the up's the
// second, and each sends the other what it has of its one.
template <class Type, class To>
struct GateAndUp {
  u32 mine, theirs, buffer;  // shared memory: to send from, to receive from (two of EXCHANGE_BYTES), to turn rows in
  int lane, barrier_name, rows;
  bool is_up;
  To to;
  u32& step;  // of all tiles: buffers alternate, so that none is written that the other warp may still read

  template <class Activate>
  __device__ __forceinline__ void round(int p, const Octet& keep, const Octet& send, bool any, Activate activate) const {
    u32 at = (step++ & 1) * EXCHANGE_BYTES + lane * 16;
#pragma unroll
    for (int i = 0; i < 2; i++)
      store_shared(mine + at + 512 * i, make_uint4(__float_as_uint(send.v[i][0][0]), __float_as_uint(send.v[i][0][1]),
                                                   __float_as_uint(send.v[i][1][0]), __float_as_uint(send.v[i][1][1])));
    barrier(barrier_name, 64);
    if (!any) return;
    Octet done;
#pragma unroll
    for (int i = 0; i < 2; i++) {
      uint4 got = load_shared<uint4>(theirs + at + 512 * i);
      float other[4] = {__uint_as_float(got.x), __uint_as_float(got.y), __uint_as_float(got.z), __uint_as_float(got.w)};
#pragma unroll
      for (int c = 0; c < 4; c++) {
        float own = keep.v[i][c >> 1][c & 1];
        done.v[i][c >> 1][c & 1] = activate(is_up ? other[c] : own, is_up ? own : other[c]);
      }
    }
    __syncwarp();
    put_octet<Type>(buffer, done, lane);
    __syncwarp();
    int row = 16 * p + 8 * is_up + (lane >> 2);
    uint4 v = load_shared<uint4>(staged(buffer, lane >> 2, lane & 3));
    if (row < rows) *(to(row) + (lane & 3)) = v;
  }
};

__device__ __forceinline__ Octet choose(bool second, const Octet& a, const Octet& b) {
  Octet chosen;
#pragma unroll
  for (int i = 0; i < 8; i++) (&chosen.v[0][0][0])[i] = second ? (&b.v[0][0][0])[i] : (&a.v[0][0][0])[i];
  return chosen;
}

// All rounds of a tile. UNROLLED: one piece of code per round, else one for all, which looks through the sums for its
// octets, since registers have no index.
template <bool UNROLLED, int T, class Pair, class Finished, class Activate>
__device__ __forceinline__ void store_pairs(const Sums<T>& sums, const Pair& pair, Finished finished, Activate activate) {
  constexpr int OCTETS = T / 8, ROUNDS = (OCTETS + 1) / 2;
#pragma unroll(UNROLLED ? ROUNDS : 1)
  for (int p = 0; p < ROUNDS; p++) {
    Octet even = {}, odd = {};
#pragma unroll
    for (int q = 0; q < ROUNDS; q++)
      if (q == p) {
        even = octet_of(sums, 2 * q);
        if (2 * q + 1 < OCTETS) odd = octet_of(sums, 2 * q + 1);
      }
    int keep = 2 * p + pair.is_up, send = 2 * p + !pair.is_up;
    pair.round(p, finished(choose(pair.is_up, even, odd), keep), finished(choose(!pair.is_up, even, odd), send),
               keep < OCTETS, activate);
  }
}
