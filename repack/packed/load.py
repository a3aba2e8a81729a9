"""A packed checkpoint -> its MoE layers on one rank, byte for byte as from its source."""

import warnings
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import torch

from ...kernels.layer import MarlinMoELayer
from ..assemble import assemble_layer
from ..blocks import BLOCK_BYTES, LayerMemory, TensorSpec, lane_blocks, plan, rank_experts, run_blocks
from ..errors import ExpertsError, MarlinMoEWarning, report
from ..pipeline import Pipeline
from ..process import Recipe
from ..scheme import QuantScheme
from ..staging import Lane, read_ahead
from ..states import Context, ExpertFacts, ExpertTensors, State
from .cut import Cut, is_cut
from .invert import repack_pipeline
from .reader import PackedCheckpoint
from .records import LayerRecord


def load_packed_layers(
    path: str | Path,
    device: torch.device,
    recipe_of: Callable[[str, QuantScheme, int | None], Recipe],
    *,
    only: Iterable[str] | None = None,
    check: bool = False,
) -> dict[str, MarlinMoELayer]:
    """Module name -> layer; `recipe_of(module, scheme, the config's top_k)` says how each is made.

    Raises:
        PackedError: a directory that is not as its manifest says; with `check` also in a tensor's hash.
        ExpertsError: an unknown name in `only`, or dead experts that the recipe does not accept.
        ShardError: as from the source.
    """
    with PackedCheckpoint(path) as packed:
        if check:
            packed.check_hashes()
        top_k = packed.checkpoint.top_k
        return {
            layer.module: load_layer(packed, layer, recipe_of(layer.module, layer.scheme, top_k), device)
            for layer in packed.layers(only)
        }


def load_layer(
    packed: PackedCheckpoint, layer: LayerRecord, recipe: Recipe, device: torch.device
) -> MarlinMoELayer:
    """One layer on one rank: cut where the slice falls on tiles, else inverted and packed again."""
    refuse_dead(layer, allowed=recipe.allow_dead_experts)
    context = recipe.context(layer.facts, device)
    experts = packed.experts(layer)
    memory = LayerMemory(device)
    rank = rank_experts(layer.facts, context)
    planned = plan(repack_pipeline(), experts, layer.facts, context)
    if is_cut(layer.facts, context):
        _cut_layer(experts, layer.facts, planned, context, memory)
    else:
        warnings.warn(
            f"{packed.path}: slices of {planned.facts.intermediate_size} intermediate columns "
            f"(tp={context.tp.size}) do not all fall on 64, so packed weights are unpacked, sliced and "
            "packed again: the same bytes, slower.",
            MarlinMoEWarning,
            stacklevel=2,
        )
        pipeline = repack_pipeline()
        run_blocks(pipeline, experts, layer.facts, context, memory, block_bytes=BLOCK_BYTES)
    result = planned.facts
    state = Pipeline.default().run_layer(State(experts=rank, facts=result, fields=memory.tensors), context)
    return assemble_layer(state, context, recipe=recipe)


def refuse_dead(layer: LayerRecord, *, allowed: bool) -> None:
    """Raise ExpertsError for projections whose scales are all zero, unless they are accepted."""
    if layer.dead_projections and not allowed:
        names = ", ".join(layer.dead_projections[:6])
        raise ExpertsError(
            f"{layer.module}: expected scales that are not all zero, got {len(layer.dead_projections)} "
            f"projections with nothing but zeros: {names}. Calibration never reached these experts; quantize "
            "again with more data, or pass allow_dead_experts (--allow-dead-experts)."
        )


def _cut_layer(
    experts: ExpertTensors, facts: ExpertFacts, planned: State, context: Context, memory: LayerMemory
) -> None:
    """The rank's tensors into `memory`: maps of the file where they lie there whole, else cut from it."""
    rank = rank_experts(facts, context)
    cut = Cut(experts=experts, facts=facts, result=planned.facts, context=replace(context, destination={}))
    specs = {
        name: TensorSpec(dtype=tensor.dtype, shape=(len(rank), *tensor.shape[1:]))
        for name, tensor in planned.tensors()
    }
    mapped = cut.mapped(rank, specs)
    memory.allocate({name: spec for name, spec in specs.items() if name not in mapped})
    if memory.tensors:
        _fill_memory(cut, rank, memory)
    memory.tensors |= mapped


def _fill_memory(cut: Cut, rank: range, memory: LayerMemory) -> None:
    """Block after block of the rank's experts."""
    context = cut.context

    def fill(block: range, lane: Lane | None) -> list[str]:
        """The block's part of the layer, through pinned memory where there is a lane; problems in it."""
        own = replace(cut, context=replace(cut.context, problems=[]))
        for name, slot in memory.block(block.start - rank.start, block.stop - rank.start).items():
            place = slot if lane is None else lane.empty(slot.shape, slot.dtype)
            own.fill(name, block, place)
            if place is not slot:
                slot.copy_(place, non_blocking=True)
        return own.context.problems

    lanes, chosen = lane_blocks(cut.experts, rank, context.device, block_bytes=BLOCK_BYTES)
    with closing(read_ahead(chosen, fill, lanes)) as found:
        for problems in found:
            context.problems.extend(problems)
    if context.problems:
        raise ExpertsError(report(cut.facts.module, context.problems))
