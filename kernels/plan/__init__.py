"""MoEProblem to MoEPlan: integers only, testable without a GPU. Modules in dependency order.

problem     the facts of a layer and of a call that decide how it runs: LayerFacts, MoEProblem
buffers     where each buffer lies in the scratch memory: BufferPlan, WorkspacePlan
reference   the buffers and the chunks of the reference backend: MoEPlan
cuda_moe    the variants and the buffers of the CUDA backend: MoEVariant
workspaces  which of them a layer's calls need
"""
