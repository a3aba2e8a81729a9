"""The kernels of `cuda/repack.cu` and `cuda/permute.cu` on tensors of a GPU: bytes as on a CPU.

All run on the current stream of the tensors' device and see addresses only: callers check shapes before.
"""

import torch

from ...kernels.device import architecture
from ...kernels.jit.launch import Argument
from ...kernels.jit.load import load_kernel
from ...kernels.jit.source import KernelSource
from ...kernels.jit.spec import BuildSpec
from ...kernels.layout import BITS, TILE_N

TILES = 2
"""Tiles of 64 columns x 32 words that one block of threads has in flight."""

THREADS, TILE_WORDS, TILE_GROUPS, VECTOR_BYTES = 256, 32, 64, 16
ELEMENTS = {2: "u16", 4: "u32"}
WEIGHT_KERNELS = tuple(
    f"{name}_qweight<{bits}, {vector}>"
    for name in ("pack", "unpack")
    for bits in BITS
    for vector in ("true", "false")
)
PERMUTE_KERNELS = (
    *(
        f"permute_scales<{element}, {grouped}>"
        for element in ELEMENTS.values()
        for grouped in ("true", "false")
    ),
    *(f"pack_zero_points<{bits}>" for bits in BITS),
)


def build_specs(arch: str, *, tiles: int = TILES) -> tuple[BuildSpec, BuildSpec]:
    """All that repacking on a device of this architecture can need: weights, then scales and zero points."""
    return (
        BuildSpec(
            source=KernelSource(name="repack.cu"),
            kernels=WEIGHT_KERNELS,
            arch=arch,
            constants={"TILES": tiles},
            label="repack weights",
        ),
        BuildSpec(
            source=KernelSource(name="permute.cu"),
            kernels=PERMUTE_KERNELS,
            arch=arch,
            label="permute scales and zero points",
        ),
    )


def pack_on_device(
    weight_packed: torch.Tensor, out: torch.Tensor, *, bits: int, tiles: int = TILES
) -> torch.Tensor:
    """`out` [B, K/16, N*bits/2] filled from `weight_packed` [B, N, K*bits/32], last dimensions contiguous."""
    _launch_weights("pack", weight_packed, out, bits=bits, tiles=tiles)
    return out


def unpack_on_device(
    qweight: torch.Tensor, out: torch.Tensor, *, bits: int, tiles: int = TILES
) -> torch.Tensor:
    """`out` [B, N, K*bits/32] filled from `qweight` [B, K/16, N*bits/2], last dimensions contiguous."""
    _launch_weights("unpack", out, qweight, bits=bits, tiles=tiles)
    return out


def permute_scales_on_device(weight_scale: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """`out` [B, G, N] filled from `weight_scale` [B, N, G] of 2 or 4 bytes an element, any strides."""
    experts, columns, groups = weight_scale.shape
    kernel = f"permute_scales<{ELEMENTS[weight_scale.element_size()]}, {'true' if groups > 1 else 'false'}>"
    blocks = experts * (columns // TILE_N) * -(-groups // TILE_GROUPS)
    arguments = (
        weight_scale.data_ptr(),
        *weight_scale.stride(),
        out.data_ptr(),
        *out.stride()[:2],
        columns,
        groups,
    )
    _launch(build_specs(architecture(out.device))[1], kernel, blocks, arguments, out)
    return out


def pack_zero_points_on_device(
    weight_zero_point: torch.Tensor, out: torch.Tensor, *, bits: int
) -> torch.Tensor:
    """`out` int32 [B, G, N*bits/32] filled from `weight_zero_point` [B, N*bits/32, G], any strides."""
    _, words, groups = weight_zero_point.shape
    arguments = (
        weight_zero_point.data_ptr(),
        *weight_zero_point.stride(),
        out.data_ptr(),
        *out.stride()[:2],
        out.numel(),
        words * 32 // bits,
        groups,
    )
    spec = build_specs(architecture(out.device))[1]
    _launch(spec, f"pack_zero_points<{bits}>", -(-out.numel() // THREADS), arguments, out)
    return out


def fits_vectors(packed: torch.Tensor, qweight: torch.Tensor) -> bool:
    """Whether both can be read and written 16 bytes at a time."""
    lines = [
        stride * tensor.element_size()
        for tensor in (packed, qweight)
        for stride, size in zip(tensor.stride()[:2], tensor.shape[:2], strict=True)
        if size > 1
    ]
    addresses = (packed.data_ptr(), qweight.data_ptr(), packed.shape[2] * packed.element_size())
    return all(number % VECTOR_BYTES == 0 for number in (*lines, *addresses))


def _launch_weights(name: str, packed: torch.Tensor, qweight: torch.Tensor, *, bits: int, tiles: int) -> None:
    experts, columns, words = packed.shape
    kernel = f"{name}_qweight<{bits}, {'true' if fits_vectors(packed, qweight) else 'false'}>"
    blocks = experts * (columns // TILE_N) * -(-words // (TILE_WORDS * tiles))
    arguments = (
        packed.data_ptr(),
        *packed.stride()[:2],
        qweight.data_ptr(),
        *qweight.stride()[:2],
        columns,
        words,
    )
    spec = build_specs(architecture(packed.device), tiles=tiles)[0]
    _launch(spec, kernel, blocks, arguments, packed)


def _launch(
    spec: BuildSpec, kernel: str, blocks: int, arguments: tuple[Argument, ...], tensor: torch.Tensor
) -> None:
    """One launch on the current stream of the tensor's device; nothing where there is nothing to do."""
    if blocks == 0:
        return
    device = tensor.device
    with torch.cuda.device(device):
        stream = torch.cuda.current_stream(device).cuda_stream
        load_kernel(spec, device, kernel=kernel).launch(blocks, THREADS, 0, stream, arguments)
