"""CUDA C++ and options to a kernel that can be launched. Modules in dependency order.

source     a .cu file with its headers, as text: KernelSource
toolkit    the NVRTC and the CUDA headers of this machine; needs no GPU
spec       everything that can change a binary, and its key: BuildSpec
ptxas      what the assembler said: registers, spills, warnings
compile    BuildSpec to cubin by NVRTC: compile_cubin, CompiledKernel
folder     a directory that only the user can write, checked every time it is opened
leftovers  what killed compilers left in the cache
cache      cubins on disk, whole or not at all
examine    the state of the cache: CacheState
build      cache, then compiler, unless forbidden: obtain_cubin, compile_all
driver     the calls into the CUDA driver, which need a GPU
launch     a launch made ready once and repeated at little cost: PreparedLaunch
load       BuildSpec and device to LoadedKernel
"""
