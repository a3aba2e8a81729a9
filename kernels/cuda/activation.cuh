// The activations, in fp32; the numbers and formulas are those of kernels/activation.py.
#pragma once
#include "args.cuh"

enum ActivationKind { SILU, GELU, GELU_TANH, SWIGLU_OAI, SILU_CLAMPED, SITU, SILU_NO_MUL, RELU2 };

__device__ __forceinline__ float sigmoid(float v) { return 1.0f / (1.0f + expf(-v)); }

__device__ __noinline__ float activate(float gate, float up, const MoEArgs& args) {
  int kind = args.activation;  // the same for all threads
  if (kind == SWIGLU_OAI || kind == SILU_CLAMPED) {
    gate = fminf(gate, args.limit);
    up = fminf(fmaxf(up, -args.limit), args.limit);
  }
  switch (kind) {
    case SILU:
    case SILU_CLAMPED:
      return gate * sigmoid(gate) * up;
    case GELU:
      return 0.5f * gate * (1.0f + erff(gate * 0.70710678118654752f)) * up;
    case GELU_TANH:
      return 0.5f * gate *
             (1.0f + tanhf(0.79788456080286536f * (gate + 0.044715f * gate * gate * gate))) * up;
    case SWIGLU_OAI:
      return gate * sigmoid(args.alpha * gate) * (up + 1.0f);
    case SITU:
      if (args.linear_beta > 0.0f) up = args.linear_beta * tanhf(up / args.linear_beta);
      return args.beta * tanhf(gate / args.beta) * sigmoid(gate) * up;
    case SILU_NO_MUL:
      return gate * sigmoid(gate);
    default:
      return fmaxf(gate, 0.0f) * fmaxf(gate, 0.0f);
  }
}
