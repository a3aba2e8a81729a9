"""The decode path's plan: what fits, what is chosen, and that its buffers hold what the kernel writes."""

import itertools
from typing import Any

import pytest
import torch

from cuda_variants import DECODE_NAMES, decode_variants
from marlin_moe.kernels.plan import cuda_moe, decode
from marlin_moe.kernels.plan.decode import DecodeVariant
from marlin_moe.kernels.plan.problem import LayerFacts, MatrixFacts
from marlin_moe.kernels.plan.variant import MoEVariant
from random_layer import random_layer

STATIC_BYTES = 4096  # what the kernel has beside its dynamic shared memory, at most
ARCHS = ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120a", "sm_199a")


def facts(**changes: Any) -> LayerFacts:
    return LayerFacts.of(random_layer(**changes))


@pytest.mark.parametrize("arch", ARCHS)
def test_every_variant_fits_the_architecture(arch: str) -> None:
    room = decode.SMEM_BYTES.get(int(arch[3:].rstrip("a")), 99 * 1024)
    for variant in decode_variants(DECODE_NAMES, arch):
        for slots in (1, 33, decode.MAX_SLOTS):
            smem = variant.smem_bytes(num_experts=decode.MAX_EXPERTS, slots=slots)
            assert smem + STATIC_BYTES <= room, variant.label
        assert variant.threads <= 1024


def test_shared_memory_grows_with_the_slots_in_steps() -> None:
    (variant, *_) = decode.variants(facts(), "sm_90a")
    sizes = [variant.smem_bytes(num_experts=384, slots=slots) for slots in range(1, decode.MAX_SLOTS + 1)]
    assert sizes == sorted(sizes)
    assert len(set(sizes)) == len(decode.SLOT_STEPS)


def test_few_rows_take_the_decode_path_and_more_the_general_one() -> None:
    layer = facts(num_experts=6)
    chosen = [cuda_moe.choose_variant(layer, rows=rows, arch="sm_80") for rows in range(1, 400)]
    kinds = [(variant.kernel, variant.token_tile) for variant, _ in itertools.groupby(chosen)]
    assert kinds == [("decode", 8), ("decode", 16), ("decode", 32), ("moe", 32)]
    assert chosen[24 - 1].token_tile == 8
    assert chosen[25 - 1].token_tile == 16
    assert (chosen[192 - 1].kernel, chosen[193 - 1].kernel) == ("decode", "moe")


def test_variants_are_what_is_chosen_in_the_order_of_rows() -> None:
    for layer in (facts(num_experts=6), facts(num_experts=200, hidden_size=64), facts(num_experts=1)):
        chosen = [cuda_moe.choose_variant(layer, rows=rows, arch="sm_89") for rows in range(1, 9000)]
        assert tuple(variant for variant, _ in itertools.groupby(chosen)) == cuda_moe.variants(layer, "sm_89")
        of_decode = (variant for variant in chosen[: decode.max_rows(layer)])
        assert tuple(v for v, _ in itertools.groupby(of_decode)) == decode.variants(layer, "sm_89")


@pytest.mark.parametrize(
    ("hidden", "intermediate", "bits", "w2_bits", "gated", "last"),
    [
        (7168, 2048, 4, 4, True, 2048),
        (7168, 2048, 8, 4, True, 2048),
        (4096, 14336, 4, 4, True, 1170),
        (4096, 14336, 8, 8, True, 585),
        (2**16, 2**15, 4, 4, True, 31),
        (2**16, 2**15, 4, 8, False, 31),  # w2 has more
        (2**20, 2**20, 4, 4, True, 0),
    ],
)
def test_ranges_of_slots_fit_their_words(
    hidden: int, intermediate: int, bits: int, w2_bits: int, gated: bool, last: int
) -> None:
    """The kernel's own arithmetic (`Ranges` in cuda/decode_work.cuh), each row a tile by itself."""
    layer = LayerFacts(
        num_experts=64,
        num_global_experts=64,
        gated=gated,
        w13=matrix(hidden, intermediate * (2 if gated else 1), bits),
        w2=matrix(intermediate, hidden, w2_bits),
        scales_dtype=torch.bfloat16,
    )
    assert decode.max_rows(layer) == last
    strips, slots1 = -(-intermediate // (256 if gated else 512)), hidden * bits // 256
    groups2, parts = -(-hidden // 512), intermediate * w2_bits // 256  # as many parts as there are slots

    def steps(rows: int) -> int:
        owners = 1024
        return (rows * max(strips * slots1, groups2 * parts) << 10) + owners - 1

    assert steps(last) < 2**32
    assert last == decode.MAX_SLOTS or steps(last + 1) >= 2**32
    (first, *_) = cuda_moe.variants(layer, "sm_80")
    assert isinstance(first, DecodeVariant) == (last > 0)


def matrix(size_k: int, size_n: int, bits: int) -> MatrixFacts:
    return MatrixFacts(
        size_k=size_k,
        size_n=size_n,
        bits=bits,
        num_groups=size_k // 128,
        zero_points=False,
        sort_order=False,
        bias=False,
    )


def test_more_experts_than_the_lists_hold_take_the_general_path() -> None:
    layer = facts(num_experts=decode.MAX_EXPERTS + 1, hidden_size=64)
    assert all(isinstance(variant, MoEVariant) for variant in cuda_moe.variants(layer, "sm_90a"))


@pytest.mark.parametrize(
    ("hidden", "intermediate", "bits", "gated"),
    [(256, 64, 4, True), (128, 192, 8, True), (192, 704, 4, False)],
)
@pytest.mark.parametrize("grid", [2, 16, 132])
def test_the_sums_of_all_pieces_fit(
    grid: int, hidden: int, intermediate: int, bits: int, gated: bool
) -> None:
    """The kernel's own arithmetic (`Work` in cuda/decode_work.cuh) for any number of tiles."""
    layer = facts(
        num_experts=40,
        hidden_size=hidden,
        padded_intermediate_size=intermediate,
        bits=bits,
        group_size=None,
        gated=gated,
    )
    slots_k = hidden * bits // 256
    strip = 512 // (2 if gated else 1)
    strips = -(-intermediate // strip)
    for rows, tile in itertools.product((1, 3, 8, 40, 200, 1280), decode.TOKEN_TILES):
        have = decode.first_sums_floats(layer, rows=rows, blocks=grid)
        for tiles in range(-(-rows // tile), min(rows, 40 + rows // tile) + 1):
            granules = tiles * strips * slots_k
            blocks = min(grid, granules)

            def owner(granule: int, granules: int = granules, blocks: int = blocks) -> int:
                return ((granule + 1) * blocks - 1) // granules

            starts = [block * granules // blocks for block in range(blocks + 1)]
            assert all(before < after for before, after in itertools.pairwise(starts)), "an empty piece"
            assert all(starts[owner(g)] <= g < starts[owner(g) + 1] for g in range(0, granules, 7))
            pieces = max(
                owner(unit * slots_k + slots_k - 1) - owner(unit * slots_k) + 1
                for unit in range(tiles * strips)
            )
            assert pieces * rows * layer.w13.size_n <= have, (rows, tile, tiles)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("intermediate", [64, 704, 14336])
def test_there_is_room_for_the_parts_that_the_kernel_needs(intermediate: int, arch: str) -> None:
    """Also in the plan of a workspace for more rows than the call has."""
    layer = wide(intermediate)
    for rows in (1, 8, 64, 2048):
        most = cuda_moe.most_slot_parts(layer, rows=rows, arch=arch)
        variant = decode.choose_variant(layer, rows=rows, arch=arch)
        assert variant is None or most >= variant.fewest_parts()
        for planned in (rows, rows + 1, 3 * rows, 8192):
            assert w2_output_bytes(layer, rows=planned, arch=arch) >= most * rows * layer.hidden_size * 4


def test_room_is_planned_for_the_device_itself() -> None:
    """Blocks with little shared memory need more parts of w2's K, which others do not pay for."""
    layer = wide(14336, num_experts=64)
    small, large = (w2_output_bytes(layer, rows=2048, arch=arch) for arch in ("sm_86", "sm_90a"))
    (tile,) = (v for v in decode.variants(layer, "sm_90a") if v.token_tile == 32)
    assert large == tile.fewest_parts() * 2048 * layer.hidden_size * 4
    assert small == 2 * large


def wide(intermediate: int, num_experts: int = 2) -> LayerFacts:
    return facts(
        num_experts=num_experts, hidden_size=64, padded_intermediate_size=intermediate, group_size=None
    )


def w2_output_bytes(layer: LayerFacts, *, rows: int, arch: str) -> int:
    plan = cuda_moe.plan_workspace(layer, rows=rows, blocks=8, arch=arch)
    (buffer,) = (buffer for buffer in plan.buffers if buffer.name == "w2_output")
    return buffer.nbytes


def test_a_larger_workspace_has_all_that_a_smaller_one_has() -> None:
    layer = facts(num_experts=3, hidden_size=64, padded_intermediate_size=64)
    for arch in ARCHS:
        plans = [
            cuda_moe.plan_workspace(layer, rows=rows, blocks=264, arch=arch) for rows in (1, 5, 96, 97, 5000)
        ]
        for small, large in itertools.pairwise(plans):
            have = {buffer.name: buffer.nbytes for buffer in large.buffers}
            assert all(buffer.nbytes <= have[buffer.name] for buffer in small.buffers)
