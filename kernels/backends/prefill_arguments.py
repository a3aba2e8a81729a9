"""The arguments of the prefill kernels as bytes: the host's side of `cuda/prefill_args.cuh`; tensor maps.

bytes     C++                          what
0..31     x .. expert_map              pointers of the call
32..111   w13, w2                      MatrixArgs: qweight, scales, zero_points, sort_order, bias
112       out
120..167  counters .. w2_output        pointers into the scratch: `SCRATCH`
168..183  x_stride, out_stride         in elements
184..223  tokens .. flags
224..243  routed_scaling_factor .. linear_beta
the end   words, scales, zeros, tokens CUtensorMap, the GEMMs' further parameters, aligned by the compiler

A tensor map is made of an address and sizes, and of nothing that lies there. So those are what it is kept by:
it stays right when `update_` writes new weights, and other memory has another one.
"""

import ctypes
import functools
import struct
from dataclasses import dataclass

import torch

from ..jit.driver import checked
from ..jit.launch import PreparedLaunch
from ..jit.toolkit import import_cuda
from ..matrix import MarlinMatrix
from ..plan.prefill import STAGE_K

PARAMETERS = struct.Struct("<21Q2q8iIi5f4x")
SCRATCH = ("counters", "routed_rows", "slot_is_here", "token_tiles", "activations", "w2_output")
"""Names of the buffers in the workspace's plan."""

MAP_BYTES = 128
NO_MAP = bytes(MAP_BYTES)

DIRECT, OUT_ALIGNED = 8, 16
"""`PrefillFlags` in `cuda/prefill_args.cuh`, behind those that all kernels have (`cuda_arguments`)."""

HALF_COLUMNS = 128
TOKEN_BOX_ROWS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    """What the copy engine takes at a time from a row-major matrix at an address.

    Attributes:
        address: of the matrix.
        element: CU_TENSOR_MAP_DATA_TYPE without its prefix.
        element_bytes: of one.
        shape: rows and columns of the matrix, in elements.
        box: rows and columns of what is taken.
        swizzled: rows of 128 bytes, their 16-byte pieces permuted as wgmma reads them.
    """

    address: int
    element: str
    element_bytes: int
    shape: tuple[int, int]
    box: tuple[int, int]
    swizzled: bool = False


def tensor_map(box: Box) -> bytes:
    """The driver's description of a box."""
    driver = import_cuda("cuda.bindings.driver")
    rows, columns = box.shape
    sizes = [driver.cuuint64_t(columns), driver.cuuint64_t(rows)]
    taken = [driver.cuuint32_t(box.box[1]), driver.cuuint32_t(box.box[0])]
    swizzle = driver.CUtensorMapSwizzle
    encoded = checked(
        driver.cuTensorMapEncodeTiled(
            getattr(driver.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{box.element}"),
            2,
            box.address,
            sizes,
            [driver.cuuint64_t(columns * box.element_bytes)],
            taken,
            [driver.cuuint32_t(1), driver.cuuint32_t(1)],
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            swizzle.CU_TENSOR_MAP_SWIZZLE_128B if box.swizzled else swizzle.CU_TENSOR_MAP_SWIZZLE_NONE,
            driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        ),
        "tensor map",
    )
    return ctypes.string_at(encoded.getPtr(), MAP_BYTES)


def weight_maps(matrix: MarlinMatrix) -> bytes:
    """The maps of a matrix's words, scales and zero points, of 128 columns and 64 inputs each."""
    zeros = matrix.zero_points
    return _weight_maps(
        (matrix.qweight.data_ptr(), matrix.scales.data_ptr(), 0 if zeros is None else zeros.data_ptr()),
        matrix.num_experts,
        matrix.size_k,
        matrix.size_n,
        matrix.num_groups,
        matrix.format.bits,
    )


@functools.lru_cache(maxsize=4096)
def _weight_maps(
    addresses: tuple[int, int, int], experts: int, size_k: int, size_n: int, groups: int, bits: int
) -> bytes:
    """Of qweight, scales and zero points, whose address is 0 where there are none."""
    qweight, scales, zero_points = addresses
    words = tensor_map(
        Box(
            address=qweight,
            element="INT64",
            element_bytes=8,
            shape=(experts * (size_k // 16), size_n * bits // 4),
            box=(STAGE_K // 16, HALF_COLUMNS * bits // 4),
        )
    )
    if groups == 1:
        return words + NO_MAP + NO_MAP
    taken = max(1, STAGE_K * groups // size_k)
    by_column = tensor_map(
        Box(
            address=scales,
            element="UINT16",
            element_bytes=2,
            shape=(experts * groups, size_n),
            box=(taken, HALF_COLUMNS),
        )
    )
    if not zero_points:
        return words + by_column + NO_MAP
    zeros = tensor_map(
        Box(
            address=zero_points,
            element="INT32",
            element_bytes=4,
            shape=(experts * groups, size_n * bits // 32),
            box=(taken, HALF_COLUMNS * bits // 32),
        )
    )
    return words + by_column + zeros


@functools.lru_cache(maxsize=4096)
def activations_map(address: int, rows: int, width: int, dtype: torch.dtype) -> bytes:
    """The map of GEMM 2's tokens [rows, width]: 16 rows of 64 inputs."""
    return tensor_map(
        Box(
            address=address,
            element="FLOAT16" if dtype == torch.float16 else "BFLOAT16",
            element_bytes=2,
            shape=(rows, width),
            box=(TOKEN_BOX_ROWS, STAGE_K),
            swizzled=True,
        )
    )


def maps_behind(launch: PreparedLaunch, maps: bytes, *, later_bytes: int = 0) -> bytes:
    """What a GEMM is told behind `PARAMETERS`: maps, at whatever offset they are aligned to.

    Where `later_bytes` of further maps come behind them, the caller adds those.
    """
    return bytes(launch.parameter_bytes - PARAMETERS.size - len(maps) - later_bytes) + maps
