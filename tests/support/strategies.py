"""hypothesis strategies: checkpoints that a tool could have written, and ranks to load them for."""

from __future__ import annotations

import torch
from hypothesis import strategies as st

from checkpoint_spec import CheckpointSpec


@st.composite
def checkpoint_specs(draw: st.DrawFn, *, actorder: bool = False, mixed: bool = False) -> CheckpointSpec:
    """Small compressed-tensors checkpoints over bits, groups, zero points, sizes, names, dtypes and shards.

    With `actorder` also every spelling of an order, with `mixed` also a w2 of other bits or groups.
    """
    group_size = draw(st.sampled_from([32, 64, 128, None]))
    down_group_size = draw(st.sampled_from([0, 32, 64, None])) if mixed else 0
    down_group = group_size if down_group_size == 0 else down_group_size
    hidden_size = draw(st.sampled_from([64, 128, 192, 256]).filter(lambda h: h % (group_size or 1) == 0))
    step = down_group or 16
    intermediate_size = step * draw(st.integers(1, max(1, 256 // step)))
    orders = [None, "weight", "static"]
    if actorder and group_size and down_group:
        orders += ["group", "dynamic", "true"]
    return CheckpointSpec(
        num_experts=draw(st.integers(1, 4)),
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        bits=draw(st.sampled_from([4, 8])),
        group_size=group_size,
        down_bits=draw(st.sampled_from([0, 4, 8])) if mixed else 0,
        down_group_size=down_group_size,
        symmetric=draw(st.booleans()),
        actorder=draw(st.sampled_from(orders)),
        dtype=draw(st.sampled_from([torch.bfloat16, torch.float16])),
        naming=draw(st.sampled_from(["qwen", "mixtral", "feed_forward", "lfm2"])),
        prefix=draw(st.sampled_from(["model.layers", "language_model.model.layers"])),
        shards=draw(st.sampled_from([1, 1, 3])),
        bias=draw(st.booleans()),
        extras=("router",),
        weight_shape=draw(st.sampled_from([torch.int64, torch.int32, None])),
        seed=draw(st.integers(0, 2**16)),
    )


@st.composite
def ranks(draw: st.DrawFn, sizes: tuple[int, ...] = (1, 2, 4, 8)) -> dict[str, int]:
    """Keyword arguments of oracle.expected_layer: one rank of a TP × EP split."""
    tp_size, ep_size = draw(st.sampled_from(sizes)), draw(st.sampled_from((1, 2, 4)))
    tp_rank, ep_rank = draw(st.integers(0, tp_size - 1)), draw(st.integers(0, ep_size - 1))
    return {"tp_rank": tp_rank, "tp_size": tp_size, "ep_rank": ep_rank, "ep_size": ep_size}
