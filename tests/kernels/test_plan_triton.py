"""The Triton backend's tiles and buffers: integers, without a tensor."""

import itertools
from dataclasses import replace

import pytest
import torch

from marlin_moe.kernels.plan.buffers import MAX_ROWS
from marlin_moe.kernels.plan.problem import LayerFacts
from marlin_moe.kernels.plan.triton_moe import (
    FP32_ROWS,
    TILES,
    choose_tiles,
    most_tiles,
    plan_workspace,
    slots_dtype,
)
from random_layer import random_layer

FACTS = LayerFacts.of(
    random_layer(num_experts=6, hidden_size=192, padded_intermediate_size=128, dtype=torch.bfloat16)
)


def test_buffers_by_name() -> None:
    plan = plan_workspace(FACTS, rows=1000)
    tiles = 6 + 1000 // 16
    shapes = {buffer.name: (buffer.dtype, buffer.shape) for buffer in plan.buffers}
    assert shapes == {
        "expert_rows": (torch.int32, (6,)),
        "tile_count": (torch.int32, (1,)),
        "sorted_slots": (torch.int32, (1000,)),
        "tile_expert": (torch.int32, (tiles,)),
        "tile_row": (torch.int32, (tiles,)),
        "tile_rows": (torch.int32, (tiles,)),
        "activations": (torch.bfloat16, (1000, 128)),
        "w2_output": (torch.bfloat16, (2000, 192)),  # or float32 [1000, 192]
    }
    ends = [(buffer.offset_bytes, buffer.offset_bytes + buffer.nbytes) for buffer in plan.buffers]
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(ends))
    assert str(plan).startswith("Triton workspace of E=6, H=192, Ip=128, 1,000 rows")
    assert plan_workspace(FACTS, rows=2**33).rows == MAX_ROWS


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rows", [1, 1000, FP32_ROWS, FP32_ROWS + 1, 3 * FP32_ROWS])
def test_slots_fit_their_buffer_in_the_dtype_that_they_have(rows: int, dtype: torch.dtype) -> None:
    """A call may have fewer rows than its plan, and then others of float32."""
    facts = replace(FACTS, scales_dtype=dtype)
    buffer = next(b for b in plan_workspace(facts, rows=rows).buffers if b.name == "w2_output")
    for fewer in {rows, min(rows, FP32_ROWS)}:
        assert fewer * facts.hidden_size * slots_dtype(facts, rows=fewer).itemsize <= buffer.nbytes
    assert slots_dtype(facts, rows=rows) == (torch.float32 if rows <= FP32_ROWS else dtype)


@pytest.mark.parametrize("tokens", [tiles.tokens for tiles in TILES])
def test_no_routing_needs_more_tiles(tokens: int) -> None:
    """All ways to spread few rows over three experts, against the bound and the buffers."""
    facts = replace(FACTS, num_experts=3)
    for counts in itertools.product(range(0, 2 * tokens + 2, max(1, tokens // 4)), repeat=3):
        rows = sum(counts)
        if rows:
            needed = sum(-(-count // tokens) for count in counts)
            bound = most_tiles(facts, rows=rows, tokens=tokens)
            assert needed <= bound
            table = next(b for b in plan_workspace(facts, rows=rows).buffers if b.name == "tile_row")
            assert bound <= table.shape[0]


def test_the_smallest_tile_that_holds_a_share() -> None:
    assert [choose_tiles(FACTS, rows=rows).tokens for rows in (1, 96, 97, 192, 193, 10**6)] == [
        16,
        16,
        32,
        32,
        64,
        64,
    ]


def test_columns_divide_every_width() -> None:
    for tiles, width in itertools.product(TILES, range(64, 2048, 64)):
        assert width % tiles.columns_of(width) == 0
        assert tiles.num_warps(width) in (4, 8)
        assert tiles.num_warps(width) * 16 == tiles.columns_of(width)
