"""Layer and tokens to output. Knows no files and no checkpoint formats. Modules in dependency order.

errors             `MarlinMoEError` and the op's errors
checks             types of arguments, values of index tensors
device             the device that a str, an int or a torch.device names
capture            calls of the driver that a stream capture would forbid
activation         the activations between the two GEMMs, and their formulas
layout             the Marlin layout and its inverse, in plain torch: the contract with `repack`
matrix             one projection of all experts in that layout: QuantFormat, MarlinMatrix
jit                source and options to cubin, by NVRTC, cached on disk
triton             device code of the Triton backend
plan               MoEProblem to MoEPlan, and the bytes of every buffer: integers only
scratch            scratch memory per device and stream, and who is alive to use it
ahead              compiling before the first call asks for it
workspace          a layer's handle on its scratch: Workspace, reserve
flat               a layer as tensors and ints, which is what crosses into a registered op
layer              MarlinMoELayer, the op's input
overlap            whether tensors lie in the same bytes
arguments          the arguments of one call, checked against the layer and each other
backends           what runs a checked call; `reference` defines what is correct
call               a checked call on its backend, and CUDA calls that are repeated
registration       the op as torch's dispatcher knows it, for tracing and export
fused_marlin_moe   the op: check once, problem, plan, backend
"""
