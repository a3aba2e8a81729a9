"""The C loop and the CUDA kernels of repacking, and their switch.

In dependency order:

    cuda_repack      the kernels on tensors of a GPU
    path             whether the C loop or the kernels are used, and why not
    repack_weights   packed words -> Marlin tiles and back, on every path
    permute          scales and zero points -> Marlin order

The C extension `_native`, which may be missing:

    native.h     what its files share: the job, a strip of 8 columns, an instruction set's functions
    scalar.c     strips in plain C
    lanes.h      strips in vector registers of any width; sse2.c, avx2.c, avx512.c (with x86.h) and
                 neon.c name the instructions for it
    variants.c   the instruction sets, best first
    blocks.c     a job cut into blocks: order, prefetching, threads
    module.c     the Python module
"""
