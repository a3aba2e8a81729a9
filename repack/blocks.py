"""Runs a pipeline block after block of experts under a byte budget, each result into its destination.

Shapes are learnt first, by running the stages once on meta tensors; then the destination is allocated whole
and every block's results are written into its slice. So the peak is the finished layer plus one block. For a
GPU the blocks are smaller, and `staging` reads some ahead while the stages run.
"""

from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from ..kernels.layout import TILE_N
from .errors import ExpertsError, PipelineError, ShardError, report
from .pipeline import CHECKPOINT_FIELDS, Pipeline
from .staging import HostMemory, Lane, hand_over, lane_count, make_lanes, read_ahead
from .states import Context, ExpertFacts, ExpertTensors, State

BLOCK_BYTES = 128 << 20
"""Source bytes that the blocks in flight hold by default: one block, on a GPU several small ones."""

STREAM_BYTES = 32 << 20
"""The same from file to file on a CPU: small blocks stay in its caches, from reading to writing."""

SPARE_BYTES = 64 << 10
"""Memory to read into beyond a block's bytes, so that every tensor can begin aligned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """dtype and shape of a tensor to allocate."""

    dtype: torch.dtype
    shape: tuple[int, ...]


class Destination(Protocol):
    """Where a layer's results go: memory, or a file."""

    def allocate(self, specs: Mapping[str, TensorSpec]) -> None:
        """Make room for the whole layer, before the first block."""

    def block(self, start: int, stop: int) -> Mapping[str, torch.Tensor]:
        """Tensors that take the results of experts [start, stop) of the rank."""

    def commit(self, start: int, stop: int) -> None:
        """The tensors of `block(start, stop)` hold their results."""


class LayerMemory:
    """`Destination` in memory: the tensors of the finished layer."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.tensors: dict[str, torch.Tensor] = {}

    def allocate(self, specs: Mapping[str, TensorSpec]) -> None:
        """Allocate all tensors, uninitialised."""
        for name, spec in specs.items():
            self.tensors[name] = torch.empty(spec.shape, dtype=spec.dtype, device=self.device)

    def block(self, start: int, stop: int) -> Mapping[str, torch.Tensor]:
        """Views of the layer's tensors."""
        return {name: tensor[start:stop] for name, tensor in self.tensors.items()}

    def commit(self, start: int, stop: int) -> None:
        """Nothing to do: the views are the layer."""


def run_blocks(
    pipeline: Pipeline,
    experts: ExpertTensors,
    facts: ExpertFacts,
    context: Context,
    destination: Destination,
    *,
    block_bytes: int = BLOCK_BYTES,
) -> ExpertFacts:
    """Every expert of this EP rank through the block stages into `destination`; the facts of the result.

    Raises:
        ExpertsError: values that no layer can have, over all blocks in one text.
        ShardError, PipelineError: before anything is allocated.
    """
    rank = rank_experts(facts, context)
    result = plan(pipeline, experts, facts, context)
    specs = {
        name: TensorSpec(dtype=tensor.dtype, shape=(len(rank), *tensor.shape[1:]))
        for name, tensor in result.tensors()
    }
    destination.allocate(specs)
    lanes, chosen = _lanes(pipeline, experts, rank, context, block_bytes)
    memory = None if lanes else _memory(pipeline, experts, chosen[0], context)

    def read(block: range, lane: Lane | None) -> tuple[State, list[str]]:
        """A block in its first state, after the stage that reads files, and the problems found there."""
        if memory is not None:
            memory.clear()
        own = replace(context, staging=lane or memory, problems=[])
        state = State(experts=block, facts=facts, fields={"expert_tensors": experts})
        return pipeline.read_block(state, own), own.problems

    with closing(read_ahead(chosen, read, lanes)) as states:
        for state, problems in states:
            context.problems.extend(problems)
            if lanes:
                hand_over(state.tensors(), context.device)
            start, stop = state.experts.start - rank.start, state.experts.stop - rank.start
            slots = destination.block(start, stop)
            state = pipeline.finish_block(state, replace(context, destination=slots))
            _place(state, slots)
            destination.commit(start, stop)
    if context.problems:
        raise ExpertsError(report(facts.module, context.problems))
    return result.facts


def plan(pipeline: Pipeline, experts: ExpertTensors, facts: ExpertFacts, context: Context) -> State:
    """The state that one expert ends in, as meta tensors: shapes, dtypes and facts; nothing is read.

    Raises:
        ShardError: the layer does not split as the context asks.
        PipelineError: the stages leave something of this layer in checkpoint layout.
    """
    meta = replace(context, device=torch.device("meta"), destination={}, problems=[])
    one = State(experts=range(1), facts=facts, fields={"expert_tensors": experts})
    result = pipeline.run_block(one, meta)
    left = [name for name in CHECKPOINT_FIELDS if name in result.fields]
    if left:
        raise PipelineError(
            f"{facts.module}: expected the stages to bring every tensor into the Marlin layout, got "
            f"{', '.join(left)} left by {', '.join(pipeline.names)}. A stage is missing."
        )
    if result.facts.padded_intermediate_size % TILE_N:
        raise PipelineError(
            f"{facts.module}: expected an intermediate size in whole tiles of {TILE_N}, got "
            f"{result.facts.padded_intermediate_size} on every rank. Stage pad is missing."
        )
    if result.facts.intermediate_size * context.tp.size != facts.intermediate_size:
        raise PipelineError(
            f"{facts.module}: expected an intermediate size of {facts.intermediate_size} / tp "
            f"{context.tp.size}, got {result.facts.intermediate_size}. Stage shard is missing."
        )
    return result


def rank_experts(facts: ExpertFacts, context: Context) -> range:
    """The experts of this EP rank, counted over the whole layer."""
    if context.ep.size > facts.num_experts:  # on every rank alike, also on those that would have one
        raise ShardError(
            f"{facts.module}: expected at least one expert on every EP rank, got {facts.num_experts} experts "
            f"for ep={context.ep.size}. EP sizes up to {facts.num_experts} work."
        )
    return range(*context.ep.bounds(facts.num_experts))


def blocks(experts: ExpertTensors, rank: range, *, block_bytes: int) -> Iterator[range]:
    """The rank's experts in blocks of at most `block_bytes` source bytes, at least one expert each."""
    size = max(1, block_bytes // max(1, expert_bytes(experts, rank[0])))
    for start in range(rank.start, rank.stop, size):
        yield range(start, min(start + size, rank.stop))


def expert_bytes(experts: ExpertTensors, expert: int) -> int:
    """Source bytes of one expert."""
    return sum(
        torch.Size(shape).numel() * dtype.itemsize
        for key, (dtype, shape) in experts.shapes.items()
        if dtype is not None and key.startswith(f"{expert}.")
    )


def lane_blocks(
    experts: ExpertTensors, rank: range, device: torch.device, *, block_bytes: int
) -> tuple[tuple[Lane, ...], list[range]]:
    """Lanes to a device and blocks for them: all lanes, and as many results, hold `block_bytes` together.

    On a CPU there are no lanes, and a block has it all.
    """
    share = block_bytes // max(1, 2 * lane_count(device))
    chosen = list(blocks(experts, rank, block_bytes=share))
    per_lane = len(chosen[0]) * expert_bytes(experts, rank[0]) + SPARE_BYTES
    return make_lanes(device, per_lane), chosen


def _lanes(
    pipeline: Pipeline, experts: ExpertTensors, rank: range, context: Context, block_bytes: int
) -> tuple[tuple[Lane, ...], list[range]]:
    """Lanes where files are read for a GPU; tensors that are in memory already are taken block by block."""
    if pipeline.reads_files and not experts.source.fills_any_device:
        return lane_blocks(experts, rank, context.device, block_bytes=block_bytes)
    return (), list(blocks(experts, rank, block_bytes=block_bytes))


def _memory(pipeline: Pipeline, experts: ExpertTensors, block: range, context: Context) -> HostMemory | None:
    """What blocks are read into, one after another, where files are read in this thread."""
    if not pipeline.reads_files or experts.source.fills_any_device or context.device.type == "meta":
        return None
    return block_memory(experts, block)


def block_memory(experts: ExpertTensors, block: range) -> HostMemory:
    """Memory for a block's source tensors."""
    return HostMemory(len(block) * expert_bytes(experts, block[0]) + SPARE_BYTES)


def _place(state: State, slots: Mapping[str, torch.Tensor]) -> None:
    """Every result into its slot; a stage that wrote there already returned the slot itself."""
    results = dict(state.tensors())
    if results.keys() != slots.keys():
        raise PipelineError(
            f"{state.facts.module}: expected the fields {', '.join(sorted(slots))} as on meta tensors, got "
            f"{', '.join(sorted(results))}. A stage decides by values what it writes."
        )
    for name, slot in slots.items():
        tensor = results[name]
        if tensor.shape != slot.shape or tensor.dtype != slot.dtype:
            raise PipelineError(
                f"{state.facts.module}.{name}: expected {slot.dtype} {tuple(slot.shape)} as on meta tensors, "
                f"got {tensor.dtype} {tuple(tensor.shape)}. A stage decides by values what it writes."
            )
        if tensor.data_ptr() != slot.data_ptr():
            slot.copy_(tensor)
