"""What runs a checked call. Modules in dependency order.

reference          any device, defines what is correct, written to be read
cuda_arguments     what CUDA kernels are told: tensors as they lie, addresses, numbers, flags
cuda_pass          the launches over a chunk of tokens, ready but for the tensors: CudaPass
prefill_arguments  the arguments of the prefill kernels, and their tensor maps
prefill            many rows on Hopper, three or four launches
cuda_moe           CUDA devices of compute capability 8.0 and up: one launch, or those of `prefill`
triton_moe         what Triton compiles for, in five launches
choose             which backend accepts a problem, and why the others do not
"""
