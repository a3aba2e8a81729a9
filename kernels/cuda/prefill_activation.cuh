// The activations, in fp32, inlined and with the fast exponential and division (2 ulp and less than bf16 or fp16 keep):
// a call would make the assembler serialize wgmma. Numbers and formulas are those of kernels/activation.py.
#pragma once
#include "activation.cuh"
#include "prefill_args.cuh"

__device__ __forceinline__ float fast_sigmoid(float v) { return __fdividef(1.0f, 1.0f + __expf(-v)); }
__device__ __forceinline__ float fast_silu(float v) { return __fdividef(v, 1.0f + __expf(-v)); }

__device__ __forceinline__ float activate_gated(float gate, float up, const PrefillArgs& args) {
  int kind = args.activation;  // the same for all threads
  if (kind == SWIGLU_OAI || kind == SILU_CLAMPED) {
    gate = fminf(gate, args.limit);
    up = fminf(fmaxf(up, -args.limit), args.limit);
  }
  switch (kind) {
    case GELU:
      return 0.5f * gate * (1.0f + erff(gate * 0.70710678118654752f)) * up;
    case GELU_TANH:
      return 0.5f * gate * (1.0f + tanhf(0.79788456080286536f * (gate + 0.044715f * gate * gate * gate))) * up;
    case SWIGLU_OAI:
      return gate * fast_sigmoid(args.alpha * gate) * (up + 1.0f);
    case SITU:
      if (args.linear_beta > 0.0f) up = args.linear_beta * tanhf(__fdividef(up, args.linear_beta));
      return args.beta * tanhf(__fdividef(gate, args.beta)) * fast_sigmoid(gate) * up;
    default:
      return fast_silu(gate) * up;
  }
}

__device__ __forceinline__ float activate_alone(float v, int kind) {
  return kind == RELU2 ? fmaxf(v, 0.0f) * fmaxf(v, 0.0f) : fast_silu(v);
}
