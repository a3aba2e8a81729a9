"""The stages in order, from a checkpoint's expert tensors to a Marlin layer: the file to read first.

    expert tensors -> gather -> order -> shard -> pad -> repack_weights -> permute_scales
                   -> permute_zero_points -> permute_bias -> attach_workspace -> layer

Each stage is a file of its name in `stages`. `blocks` runs them block after block; offline repacking leaves
out `attach_workspace`. Fields in checkpoint layout are called `w13_weight_packed`, `w13_weight_scale`,
`w13_weight_zero_point`, `w13_weight_g_idx`, `w13_weight_bias`, in Marlin layout `w13_qweight`, `w13_scales`,
`w13_zero_points`, `w13_sort_order`, `w13_bias`; w2 alike.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from ..kernels.checks import check_type
from .errors import PipelineError
from .stage import Stage, both, stage
from .stages.attach_workspace import attach_workspace
from .stages.gather import gather
from .stages.order import order
from .stages.pad import pad
from .stages.permute_bias import permute_bias
from .stages.permute_scales import permute_scales
from .stages.permute_zero_points import permute_zero_points
from .stages.repack_weights import repack_weights
from .stages.shard import shard
from .states import Context, State

__all__ = ["STAGES", "Context", "Pipeline", "Stage", "State", "both", "stage"]

STAGES = (
    gather,
    order,
    shard,
    pad,
    repack_weights,
    permute_scales,
    permute_zero_points,
    permute_bias,
    attach_workspace,
)
RESULTS = both("qweight", "scales")
CHECKPOINT_FIELDS = both("weight_packed", "weight_scale", "weight_zero_point", "weight_g_idx", "weight_bias")


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Stages that fit one another, checked when it is made.

    Attributes:
        stages: in order.
        inputs: the fields of the first state.

    Raises:
        PipelineError: a stage reads what no stage before it writes, stands in the wrong place or twice, or
            the result is incomplete; it says which stage is missing or misplaced.

    Example:
        Pipeline.default().insert_after("gather", my_stage).without("pad")
    """

    stages: tuple[Stage, ...]
    inputs: tuple[str, ...] = ("expert_tensors",)

    def __post_init__(self) -> None:
        check_type("Pipeline: stages", self.stages, Iterable)
        object.__setattr__(self, "stages", tuple(self.stages))
        for item in self.stages:
            if not isinstance(item, Stage):
                raise TypeError(
                    f"Pipeline: expected Stage objects, got {type(item).__name__} {item!r}. Decorate it with "
                    "@stage(…)."
                )
        _check_order(self.stages)
        _check_fields(self.stages, self.inputs)

    @classmethod
    def default(cls) -> "Pipeline":
        """All stages, for a layer that runs in this process."""
        return cls(STAGES)

    @classmethod
    def offline(cls) -> "Pipeline":
        """Without a workspace, for a layer that is written to a file."""
        return cls.default().without("attach_workspace")

    @property
    def names(self) -> tuple[str, ...]:
        """The stages' names in order."""
        return tuple(item.name for item in self.stages)

    def without(self, *names: str) -> "Pipeline":
        """This pipeline without some stages."""
        for name in names:
            self._index(name)
        return Pipeline(tuple(s for s in self.stages if s.name not in names), self.inputs)

    def replace(self, name: str, new: Stage) -> "Pipeline":
        """This pipeline with `new` in place of the stage called `name`."""
        i = self._index(name)
        return Pipeline((*self.stages[:i], new, *self.stages[i + 1 :]), self.inputs)

    def insert_after(self, name: str, new: Stage) -> "Pipeline":
        """This pipeline with `new` behind the stage called `name`."""
        i = self._index(name)
        return Pipeline((*self.stages[: i + 1], new, *self.stages[i + 1 :]), self.inputs)

    def starting_with(self, name: str, *, inputs: tuple[str, ...]) -> "Pipeline":
        """The stages from `name` on, for states that hold `inputs` already."""
        return Pipeline(self.stages[self._index(name) :], inputs)

    def run_block(self, state: State, context: Context) -> State:
        """All stages that work on a block of experts."""
        return self.finish_block(self.read_block(state, context), context)

    def read_block(self, state: State, context: Context) -> State:
        """The first stage, where it is one that reads files."""
        return _run(self.stages[0], state, context) if self.reads_files else state

    def finish_block(self, state: State, context: Context) -> State:
        """The stages that work on a block of experts, after `read_block`."""
        for item in self.stages[int(self.reads_files) :]:
            if not item.whole_layer:
                state = _run(item, state, context)
        return state

    @property
    def reads_files(self) -> bool:
        """Whether the first stage reads files."""
        return bool(self.stages) and self.stages[0].reads_files

    def run_layer(self, state: State, context: Context) -> State:
        """The stages that work on the whole layer, once all blocks are in their destination."""
        for item in self.stages:
            if item.whole_layer:
                state = _run(item, state, context)
        return state

    def _index(self, name: str) -> int:
        if name not in self.names:
            raise PipelineError(
                f"{name}: expected a stage of this pipeline ({', '.join(self.names)}), got none so called."
            )
        return self.names.index(name)


def _run(item: Stage, state: State, context: Context) -> State:
    result = item(state, context)
    if not isinstance(result, State):
        raise PipelineError(
            f"{item.name}: expected the stage to return a State, got {type(result).__name__}."
        )
    absent = [name for name in item.writes if name not in result.fields]
    kept = [name for name in item.drops if name in result.fields and name not in item.writes]
    declared = {*item.writes, *item.writes_optional}
    undeclared = [
        name
        for name, value in result.fields.items()
        if name not in declared and value is not state.fields.get(name)
    ]
    lost = [name for name in state.fields if name not in {*result.fields, *item.drops, *declared}]
    for names, problem in (
        (absent, "did not write"),
        (kept, "did not drop"),
        (undeclared, "wrote undeclared"),
        (lost, "dropped undeclared"),
    ):
        if names:
            raise PipelineError(
                f"{item.name}: expected the stage to do what it declares (writes "
                f"{', '.join(item.writes) or 'nothing'}; drops {', '.join(item.drops) or 'nothing'}), but it "
                f"{problem} {', '.join(names)}."
            )
    return result


def _check_order(stages: tuple[Stage, ...]) -> None:
    names = [item.name for item in stages]
    for i, item in enumerate(stages):
        if item.name in names[:i]:
            raise PipelineError(f"{item.name}: expected each stage once, got it twice: {', '.join(names)}.")
        late = [name for name in item.after if name in names[i + 1 :]]
        if late:
            raise PipelineError(
                f"{item.name}: expected after {', '.join(late)}, got it before: {', '.join(names)}. Move it "
                "behind."
            )
        if not item.whole_layer and any(before.whole_layer for before in stages[:i]):
            raise PipelineError(
                f"{item.name}: expected before the stages of the whole layer, because it works on blocks of "
                f"experts, got the order {', '.join(names)}."
            )


def _check_fields(stages: tuple[Stage, ...], inputs: Iterable[str]) -> None:
    there = set(inputs)
    for i, item in enumerate(stages):
        absent = [field for field in item.reads if field not in there]
        if absent:
            raise PipelineError(
                f"{item.name}: expected {', '.join(absent)} from the "
                f"stages before it, got {', '.join(sorted(there))}. " + _who_writes(absent[0], stages, i)
            )
        there = (there - set(item.drops)) | set(item.writes)
    absent = [field for field in RESULTS if field not in there]
    if absent:
        raise PipelineError(
            f"Pipeline: expected its stages to write {', '.join(RESULTS)}, got none for {', '.join(absent)}. "
            + _who_writes(absent[0], stages, len(stages))
        )


def _who_writes(field: str, stages: tuple[Stage, ...], place: int) -> str:
    """Which stage is misplaced or missing where `field` is read at `place`."""
    for item in stages[place + 1 :]:
        if field in item.writes and field not in item.reads:
            return f"Stage {item.name} writes it and is misplaced: it comes later."
    for item in stages[:place]:
        if field in item.drops:
            return f"Stage {item.name} dropped it: one of the two is misplaced."
    writers = [item.name for item in STAGES if field in item.writes]
    return f"Stage {writers[0]} writes it and is missing." if writers else "No known stage writes it."
