"""Checkpoint to layer. `pipeline` is the file to read first. Modules in dependency order.

errors          errors of reading, repacking and storing
tensor_file     one safetensors file: header checked, tensors read by position
checkpoint      a directory: config, index, tensors read when asked for
model_path      a directory, or the name of a model on the hub
experts         where the routed experts of a checkpoint are
scheme          quantization_config to the QuantScheme of one MoE layer
staging         memory that blocks are read into, and their way to a GPU
states          what flows between stages: ExpertTensors, State, Context
quant_methods   one file per quantization tool: its config, its tensors
layers          the quantized MoE layers of an open checkpoint, in order
dequantize      a quantized linear that is no expert, to its weight
check           a layer's tensors against its scheme, from headers alone
native          the loop over packed words, in C or in torch
assemble        a finished state to MarlinMoELayer
stage           what a stage declares: reads, writes, drops
stages          one file per stage, in the order in which they run
pipeline        the stages in order, checked to fit
blocks          a pipeline over blocks of experts, under a byte budget
process         process_weights, update_weights_
progress        what a long run tells whoever watches it
workers         files made side by side, by threads
attendance      which ranks have come, and which are silent
ranks           processes that share one run
packed          the packed checkpoint: its files, manifest, journal, reader
load            load_layers
repack_run      the order of a repack: opened by rank 0, made by all, closed by rank 0
store           source to packed checkpoint: repack_checkpoint
verify          a packed checkpoint against its manifest and its source
unpack          a packed checkpoint to its source again
advice          what a TP x EP split makes of a layer
rank_facts      what the op plans a rank's layer by, and its scratch memory
build_kernels   the CUDA kernels that a checkpoint needs, compiled ahead
inspect_report  what inspect finds
inspect_packed  the same of a packed checkpoint
inspect         inspect_checkpoint
"""
