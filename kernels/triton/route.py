"""Slots (token, k) to rows sorted by expert, and the token tiles of both GEMMs: a program per expert.

    ids      slot 0: e2   slot 1: e0   slot 2: e2   slot 3: -1        TOKEN_TILE = 2
    rows     0: slot 1 (e0)   1: slot 0 (e2)   2: slot 2 (e2)
    tiles    (e0, row 0, 1 row)   (e2, row 1, 2 rows)

Every program looks at all slots, which needs no atomics; rows of one expert stand in the order of their
slots. Two launches, since where rows begin depends on the counts of all.
"""

import triton
import triton.language as tl


@triton.jit
def expert_of(topk_ids, expert_map, slots, mask, NUM_GLOBAL: tl.constexpr, NUM_EXPERTS: tl.constexpr):
    """int32: the expert of this rank that each slot reaches, or -1; `slots` is a tensor or a number."""
    ids = tl.load(topk_ids + slots, mask=mask, other=-1)
    known = (ids >= 0) & (ids < NUM_GLOBAL)
    if expert_map is not None:
        local = tl.load(expert_map + ids, mask=known, other=-1)
    else:
        local = tl.where(known, ids, -1).to(tl.int32)
    return tl.where((local >= 0) & (local < NUM_EXPERTS), local, -1)


@triton.jit(do_not_specialize=["slots"], do_not_specialize_on_alignment=["topk_ids", "expert_map"])
def count_rows(
    topk_ids,
    expert_map,
    expert_rows,
    slots,
    NUM_GLOBAL: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """expert_rows [E]: how many slots reach each expert. Grid [E]."""
    expert = tl.program_id(0)
    found = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, slots, BLOCK):
        slot = start + tl.arange(0, BLOCK)
        reached = expert_of(topk_ids, expert_map, slot, slot < slots, NUM_GLOBAL, NUM_EXPERTS)
        found += (reached == expert).to(tl.int32)
    tl.store(expert_rows + expert, tl.sum(found, 0))


@triton.jit(do_not_specialize=["slots"], do_not_specialize_on_alignment=["topk_ids", "expert_map"])
def place_rows(
    topk_ids,
    expert_map,
    expert_rows,
    sorted_slots,
    tile_count,
    tile_expert,
    tile_row,
    tile_rows,
    slots,
    NUM_GLOBAL: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    TOKEN_TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """The slots of each expert to its rows, and its token tiles. Grid [E]."""
    expert = tl.program_id(0)
    experts = tl.arange(0, BLOCK_E)
    rows_of = tl.load(expert_rows + experts, mask=experts < NUM_EXPERTS, other=0)
    tiles_of = (rows_of + TOKEN_TILE - 1) // TOKEN_TILE
    rows = tl.load(expert_rows + expert)
    tiles = (rows + TOKEN_TILE - 1) // TOKEN_TILE
    first_row = tl.sum(tl.where(experts < expert, rows_of, 0), 0)
    first_tile = tl.sum(tl.where(experts < expert, tiles_of, 0), 0)
    if expert == 0:
        tl.store(tile_count, tl.sum(tiles_of, 0))

    for start in range(0, tiles, BLOCK):
        tile = start + tl.arange(0, BLOCK)
        place, mask = first_tile + tile, tile < tiles
        tl.store(tile_expert + place, tl.zeros((BLOCK,), tl.int32) + expert, mask=mask)
        tl.store(tile_row + place, first_row + tile * TOKEN_TILE, mask=mask)
        tl.store(tile_rows + place, tl.minimum(rows - tile * TOKEN_TILE, TOKEN_TILE), mask=mask)

    placed = first_row
    for start in range(0, slots, BLOCK):
        slot = start + tl.arange(0, BLOCK)
        reached = expert_of(topk_ids, expert_map, slot, slot < slots, NUM_GLOBAL, NUM_EXPERTS)
        mine = (reached == expert).to(tl.int32)
        tl.store(sorted_slots + placed + tl.cumsum(mine, 0) - mine, slot, mask=mine != 0)
        placed += tl.sum(mine, 0)
