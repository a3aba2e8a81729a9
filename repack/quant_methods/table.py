"""`quantization_config.quant_method` -> how to read it."""

from collections.abc import Mapping

from .awq import AWQ
from .compressed_tensors import CompressedTensors
from .gptq import GPTQ
from .method import QuantMethod

METHODS: Mapping[str, QuantMethod] = {
    "compressed-tensors": CompressedTensors(),
    "gptq": GPTQ(),
    "awq": AWQ(),
}
