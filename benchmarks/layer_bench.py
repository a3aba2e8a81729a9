"""One shape and format on the device: its layers, what runs them, and a point for each number of tokens."""

import gc
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from layer_ours import Ours, OursPerCall
from layer_problems import Case, Ceilings, LayerShape, WeightFormat, floor_us, layer_count, layer_flops
from layer_tensors import Routing, dense_rows, random_layer, random_routing, relative_error, rows_of
from layer_timing import Protocol, Replays, Timing, eager_us, measure, watched
from peers_humming import Humming
from peers_vllm import Vllm

from marlin_moe import MarlinMoELayer
from marlin_moe.cli.bench_results import Measured, Point

CHECKED_ROWS = 4

Implementation = Callable[[int, torch.Tensor, Routing], torch.Tensor]
"""(index of the layer, x [M, H], routing) -> y [M, H]."""

MAKERS: dict[str, Callable[[Sequence[MarlinMoELayer], Sequence[int]], Implementation]] = {
    "ours": lambda layers, rows: Ours(layers),
    "ours-per-call": lambda layers, rows: OursPerCall(layers),
    "ours-triton": lambda layers, rows: Ours(layers, backend="triton"),
    "ours-triton-per-call": lambda layers, rows: OursPerCall(layers, backend="triton"),
    "vllm": lambda layers, rows: Vllm(layers),
    "vllm-per-call": lambda layers, rows: Vllm(layers, per_call=True),
    "humming": lambda layers, rows: Humming(layers, rows=rows),
}
"""From layers and the numbers of rows (M * T) that will run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What was asked for.

    Attributes:
        names: implementations, in the order of `MAKERS`' keys as asked for.
        eager_tokens: numbers of tokens that are timed without a graph, too.
        layers: in one graph; by their bytes if None.
        check: compare with float64 and with the first implementation.
        patience_s: a step that takes longer hangs.
        ceilings: what the device reaches.
    """

    names: tuple[str, ...]
    eager_tokens: tuple[int, ...]
    layers: int | None
    check: bool
    patience_s: float
    protocol: Protocol
    ceilings: Ceilings
    device: str = "cuda"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """The layers of one shape and format, the implementations that take them, and why the others do not."""

    run: Run
    shape: LayerShape
    form: WeightFormat
    layers: list[MarlinMoELayer]
    ready: dict[str, Implementation]
    refused: dict[str, str]

    @classmethod
    def build(cls, run: Run, case: Case) -> "Bench":
        """Random layers, and every implementation on them: all numbers of tokens share them."""
        shape, form = case.shape, case.form
        count = run.layers or layer_count(shape, form)
        layers = [random_layer(shape, form, device=run.device) for _ in range(count)]
        ready: dict[str, Implementation] = {}
        refused: dict[str, str] = {}
        for name in run.names:
            try:
                ready[name] = MAKERS[name](layers, [tokens * shape.top_k for tokens in case.tokens])
            except Exception as error:
                error.add_note(f"in {name}, {shape.name} {form.name}")
                refused[name] = reason_of(error, run.device)
            if name in refused:
                free_memory(run.device)
        return cls(run=run, shape=shape, form=form, layers=layers, ready=ready, refused=refused)

    def point(self, tokens: int) -> Point:
        """Every implementation at a number of tokens; one that fails is refused with its error."""
        x = torch.randn(tokens, self.shape.hidden_size, device=self.run.device).bfloat16()
        routings = [random_routing(self.shape, tokens=tokens, device=self.run.device) for _ in self.layers]
        refused, found = dict(self.refused), dict[str, dict[str, float]]()
        graphs: dict[str, Replays] = {}
        check = Check.of(self.layers[0], x, routings[0]) if self.run.check else None
        for name, implementation in self.ready.items():
            all_layers = partial(_run_layers, implementation, x, routings)
            try:
                with watched(f"{self.shape.name} M={tokens} {name}", seconds=self.run.patience_s):
                    values = {} if check is None else check.errors(implementation)
                    replays = Replays(all_layers, layers=len(self.layers), protocol=self.run.protocol)
                    if tokens in self.run.eager_tokens:
                        samples = self.run.protocol.eager_samples
                        values["eager_us"] = eager_us(all_layers, layers=len(self.layers), samples=samples)
                if isinstance(implementation, Ours):
                    values["workspace_bytes"] = implementation.workspace_bytes(routings[0].ids.numel())
                    values["layer_workspace_bytes"] = implementation.layer_workspace_bytes()
            except Exception as error:
                error.add_note(f"in {name}, {self.shape.name} {self.form.name} M={tokens}")
                refused[name] = reason_of(error, self.run.device)
            else:
                graphs[name], found[name] = replays, values
            if name in refused:
                free_memory(self.run.device)
        del check
        with watched(f"{self.shape.name} M={tokens} replays", seconds=self.run.patience_s):
            times = measure(graphs, self.run.protocol)
        active = [routing.active_experts for routing in routings]
        return Point(
            shape=self.shape.name,
            format=self.form.name,
            tokens=tokens,
            layers=len(self.layers),
            active_experts=sum(active) / len(active),
            floor_us=round(sum(self.floor_us(tokens, count) for count in active) / len(active), 2),
            measured={
                name: Measured(refused=refused[name])
                if name in refused
                else Measured(
                    **asdict(times[name]),
                    **found[name],
                    matmul_fraction=self.matmul_fraction(tokens, times[name]),
                )
                for name in self.run.names
            },
        )

    def floor_us(self, tokens: int, active_experts: int) -> float:
        """The floor of one layer."""
        return floor_us(
            self.shape,
            self.form,
            tokens=tokens,
            active_experts=active_experts,
            ceilings=self.run.ceilings,
        )

    def matmul_fraction(self, tokens: int, timing: Timing) -> float:
        """The layer's operations per second under load over the matmul rate."""
        flops_per_s = layer_flops(self.shape, tokens=tokens) / (timing.sustained_us * 1e-6)
        return round(flops_per_s / self.run.ceilings.matmul_flops_per_s, 4)


@dataclass(slots=True, kw_only=True)
class Check:
    """What layer 0 gives for some tokens, worked out once for all implementations.

    Attributes:
        rows, want: some of the tokens, and their outputs in float64.
        first: the output of the first implementation that gave one.
    """

    x: torch.Tensor
    routing: Routing
    rows: torch.Tensor
    want: torch.Tensor
    first: torch.Tensor | None = None

    @classmethod
    def of(cls, layer: MarlinMoELayer, x: torch.Tensor, routing: Routing) -> "Check":
        """For tokens x."""
        rows = torch.randperm(len(x), device=x.device)[:CHECKED_ROWS]
        return cls(x=x, routing=routing, rows=rows, want=dense_rows(layer, x[rows], rows_of(routing, rows)))

    def errors(self, implementation: Implementation) -> dict[str, float]:
        """The error against float64 on some rows, and the difference from the first output on all.

        While ours runs `torch.empty` gives NaN, so that nothing stale passes for a result.
        """
        torch.use_deterministic_algorithms(isinstance(implementation, Ours), warn_only=True)
        try:
            got = implementation(0, self.x, self.routing)
        finally:
            torch.use_deterministic_algorithms(False)
        if self.first is None:
            self.first = got
        return {
            "relative_error": relative_error(got[self.rows], self.want),
            "difference": relative_error(got, self.first),
        }


def reason_of(error: Exception, device: str) -> str:
    """The error in a line. One that loses the device to this process is raised again."""
    if torch.device(device).type == "cuda":
        try:
            torch.cuda.synchronize()
        except RuntimeError:
            raise error from None
    said = next(iter(str(error).splitlines()), "")
    if not said:  # a bare assert, say
        frame = traceback.extract_tb(error.__traceback__)[-1]
        said = f"{Path(frame.filename).name}:{frame.lineno}: {frame.line}"
    return f"{type(error).__name__}: {said}"


def free_memory(device: str) -> None:
    """Gives back what an implementation that failed held."""
    gc.collect()
    if torch.device(device).type == "cuda":
        torch.cuda.empty_cache()


def _run_layers(implementation: Implementation, x: torch.Tensor, routings: Sequence[Routing]) -> None:
    for index, routing in enumerate(routings):
        implementation(index, x, routing)
