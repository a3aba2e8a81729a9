"""What runs a checked call. Modules in dependency order.

reference          any device, defines what is correct, written to be read
cuda_arguments     the arguments of the CUDA kernel as bytes
cuda_moe           CUDA devices of compute capability 8.0 and up, one launch for a layer
prefill_arguments  the arguments of the prefill kernels, and their tensor maps
prefill            many rows on Hopper, three or four launches; nothing chooses it yet
choose             which backend accepts a problem, and why the others do not
"""
