// A finished sum over K of one column: scale, router weight, bias.
#pragma once
#include "number.cuh"

// Where column n of single scales and of a bias lies: per 32 columns, 8a + 2i + b is at 8i + 2a + b.
__device__ __forceinline__ int single_order(int column) {
  int c = column & 31;
  return (column & ~31) | ((c & 6) << 2) | ((c & 24) >> 2) | (c & 1);
}

// A finished sum of one column: times its scale where the fragments were not scaled, and the router weight where
// that belongs on the input (the GEMM is linear), plus the bias.
template <class T, class F>
__device__ __forceinline__ float finish(float sum, const MatrixArgs& matrix, int expert, int column, int size_n,
                                        float input_weight) {
  u64 place = static_cast<u64>(expert) * size_n + single_order(column);
  typedef const typename T::Scalar* Scalars;
  if (!F::GROUP) sum *= T::to_float(static_cast<Scalars>(matrix.scales)[place]);
  sum *= input_weight;
  return matrix.bias ? sum + T::to_float(static_cast<Scalars>(matrix.bias)[place]) : sum;
}
