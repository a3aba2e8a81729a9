"""One file per quantization tool: how its config names a scheme, and which tensors its projections have.

method              what such a file provides: QuantMethod
compressed_tensors  pack-quantized checkpoints of llm-compressor
gptq                AutoGPTQ's and GPTQModel's checkpoints, both zero-point conventions
awq                 AutoAWQ's "gemm" checkpoints
table               quant_method -> its file
"""
