"""The activations, in float32; the numbers and formulas are those of `marlin_moe.kernels.activation`."""

import triton
import triton.language as tl


@triton.jit
def activate(gate, up, alpha, limit, beta, linear_beta, KIND: tl.constexpr):
    """The activation of gate and up, or of gate alone where KIND is ungated."""
    if KIND == "swiglu_oai" or KIND == "silu_clamped":
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit)
    if KIND == "silu" or KIND == "silu_clamped":
        return gate * tl.sigmoid(gate) * up
    elif KIND == "gelu":
        return 0.5 * gate * (1.0 + tl.erf(gate * 0.70710678118654752)) * up
    elif KIND == "gelu_tanh":
        inner = 0.79788456080286536 * (gate + 0.044715 * gate * gate * gate)
        return 0.5 * gate * (1.0 + tanh(inner)) * up
    elif KIND == "swiglu_oai":
        return gate * tl.sigmoid(alpha * gate) * (up + 1.0)
    elif KIND == "situ":
        if linear_beta > 0.0:
            up = linear_beta * tanh(up / linear_beta)
        return beta * tanh(gate / beta) * tl.sigmoid(gate) * up
    elif KIND == "silu_no_mul":
        return gate * tl.sigmoid(gate)
    else:
        tl.static_assert(KIND == "relu2")
        return tl.maximum(gate, 0.0) * tl.maximum(gate, 0.0)


@triton.jit
def tanh(v):
    """Near 0, where 2 * sigmoid - 1 loses digits, by its series; Triton's own language has no tanh."""
    near = v * (1.0 - v * v * (1.0 / 3.0 - v * v * (2.0 / 15.0)))
    return tl.where(tl.abs(v) < 0.05, near, 2.0 * tl.sigmoid(2.0 * v) - 1.0)
