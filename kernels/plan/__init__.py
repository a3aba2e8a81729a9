"""MoEProblem to MoEPlan: integers only, testable without a GPU. Modules in dependency order.

problem     the facts of a layer and of a call that decide how it runs: LayerFacts, MoEProblem
buffers     where each buffer lies in the scratch memory: BufferPlan, WorkspacePlan
reference   the buffers and the chunks of the reference backend: MoEPlan
variant     what is constant in a CUDA kernel: KernelVariant, and the general path's MoEVariant
decode      the decode path: DecodeVariant
cuda_moe    which kernel of the CUDA backend runs a call, and the buffers of all
prefill     the prefill path on Hopper, which nothing chooses yet: GemmVariant, PrefillVariant
workspaces  which of them a layer's calls need
"""
