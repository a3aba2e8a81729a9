"""`Stage`: a function from state to state that declares which fields it reads, writes and drops."""

import pkgutil
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from .states import Context, State

StageFunction = Callable[[State, Context], State]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One step of the pipeline.

    On a CPU the next block is read over the fields of the one before: what is kept beyond a block is cloned.

    Attributes:
        name: as in `Pipeline.without(name)`.
        function: (state, context) -> state. It is also called once on meta tensors, to learn shapes.
        reads: fields that must be there.
        reads_optional: fields that it takes along where the layer has them.
        writes: fields that are there afterwards.
        writes_optional: fields that may be there afterwards.
        drops: fields that are gone afterwards.
        after: names of stages that, where the pipeline has them, come before this one.
        whole_layer: it runs once, on all experts in their destination, after the last block.
        reads_files: a first stage that reads what the others work on. For a GPU it runs ahead of them, on
            another thread and stream; its state and context are then all that it may touch.
    """

    name: str
    function: StageFunction
    reads: tuple[str, ...] = ()
    reads_optional: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    writes_optional: tuple[str, ...] = ()
    drops: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    whole_layer: bool = False
    reads_files: bool = False

    def __call__(self, state: State, context: Context) -> State:
        """The next state."""
        return self.function(state, context)

    def __reduce__(self) -> tuple[Any, ...]:
        """A stage that stands in a module is pickled by its name there, as functions are."""
        place = f"{self.function.__module__}:{self.function.__qualname__}"
        if _found(place) is self:
            return pkgutil.resolve_name, (place,)
        return _made, ({field.name: getattr(self, field.name) for field in fields(self)},)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Stage":
        """Itself: nothing in it changes."""
        return self


def _found(place: str) -> Any:
    """What has the name `module:name`; None where nothing has, as for functions inside functions."""
    try:
        return pkgutil.resolve_name(place)
    except (ImportError, AttributeError, ValueError):
        return None


def _made(parts: dict[str, Any]) -> Stage:
    return Stage(**parts)


def stage(
    *,
    name: str | None = None,
    reads: tuple[str, ...] = (),
    reads_optional: tuple[str, ...] = (),
    writes: tuple[str, ...] = (),
    writes_optional: tuple[str, ...] = (),
    drops: tuple[str, ...] = (),
    after: tuple[str, ...] = (),
    whole_layer: bool = False,
    reads_files: bool = False,
) -> Callable[[StageFunction], Stage]:
    """Make a `Stage` of a function `(state, context) -> state`; its name is the function's unless given.

    Example:
        @stage(reads=("w13_weight_scale",), writes=("w13_weight_scale",))
        def halve_scales(state, context):
            return state.evolve(w13_weight_scale=state["w13_weight_scale"] / 2)

        pipeline = Pipeline.default().insert_after("gather", halve_scales)
    """

    def make(function: StageFunction) -> Stage:
        return Stage(
            name=name or function.__name__,
            function=function,
            reads=reads,
            reads_optional=reads_optional,
            writes=writes,
            writes_optional=writes_optional,
            drops=drops,
            after=after,
            whole_layer=whole_layer,
            reads_files=reads_files,
        )

    return make


def both(*fields: str) -> tuple[str, ...]:
    """Each field of w13 and of w2: `both("qweight")` is `("w13_qweight", "w2_qweight")`."""
    return tuple(f"{matrix}_{field}" for matrix in ("w13", "w2") for field in fields)
