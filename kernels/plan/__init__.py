"""MoEProblem to MoEPlan: integers only, testable without a GPU. Modules in dependency order.

problem     the facts of a layer and of a call that decide how it runs: LayerFacts, MoEProblem
buffers     where each buffer lies in the scratch memory: BufferPlan, WorkspacePlan
reference   the buffers and the chunks of the reference backend: MoEPlan
variant     what is constant in a CUDA kernel: KernelVariant, and the general path's MoEVariant
decode      the decode path: DecodeVariant
prefill     the prefill path on Hopper: GemmVariant, PrefillVariant
estimate    about how long the decode path and the prefill path take
paths       which path runs a call, by its rows
cuda_moe    which kernels of the CUDA backend run a call, and the buffers of all
triton_moe  the tiles of the Triton backend, and its buffers: Tiles
workspaces  which of them a layer's calls need
"""
