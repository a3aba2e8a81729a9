"""Device code of the Triton backend, split by the movement of data. Modules in dependency order.

Only `backends.triton_moe` imports them, once a call asks for it: each imports triton.

route        slots to rows sorted by expert, and the token tiles of both GEMMs
dequant      Marlin words, scales and zero points to a tile of weights
activation   the activations, in float32
gemm         a token tile times an expert's weights: both GEMMs
reduce       one row per slot to one row per token
"""
