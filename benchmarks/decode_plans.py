"""The decode path's plan beside others: teams, ring stages, token tiles, measured in turn on one GPU.

    python benchmarks/decode_plans.py --shapes qwen3,mixtral --tokens 1,8,32
    python benchmarks/decode_plans.py --compile                     # no GPU: fills the cubin cache ahead

The plan (`kernels/plan/decode.py`) is fixed for each architecture; this is where its constants come from.
Medians of graph replays over several layers with cold weights, in burst; the first column is the plan that is
chosen, the others are in per cent of its time. Results are compared with the first, bit by bit where the
token tile is the same.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import click
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))  # PYTHONSAFEPATH leaves it out

from layer_options import containing, formats_of, numbers
from layer_problems import FORMATS, SHAPES, LayerShape, WeightFormat, layer_count
from layer_tensors import Routing, random_layer, random_routing, relative_error
from layer_timing import Protocol, Replays, measure, watched

from marlin_moe import MarlinMoELayer
from marlin_moe.kernels.arguments import MoEArguments
from marlin_moe.kernels.backends.cuda_moe import build_spec, run_variant
from marlin_moe.kernels.jit.build import compile_all
from marlin_moe.kernels.plan import decode
from marlin_moe.kernels.plan.decode import SMEM_BYTES, TOKEN_TILES, DecodeVariant
from marlin_moe.kernels.plan.problem import LayerFacts
from marlin_moe.kernels.plan.workspaces import plan_workspace
from marlin_moe.kernels.scratch import Lease, Scratch, StreamKey

ARCH = "sm_90a"
PLANS = ((2, 3), (2, 4), (3, 2), (3, 3), (1, 6), (1, 8))
"""(teams of eight warps, stages of each team's ring)."""


def alternatives(facts: LayerFacts, *, rows: int) -> dict[str, DecodeVariant]:
    """The chosen variant for `rows` rows, first, and all others that fit the shared memory; by label."""
    chosen = decode.variant(facts, token_tile=decode.token_tile(facts, rows=rows), arch=ARCH)
    found = {"chosen": chosen}
    for tile in (tile for tile in TOKEN_TILES if tile <= 16):
        for teams, stages in PLANS:
            one = decode.variant(facts, token_tile=tile, arch=ARCH)
            one = replace(one, teams=teams, ring_stages=stages)
            need = one.smem_bytes(num_experts=facts.num_experts, slots=rows)
            if one not in found.values() and need <= SMEM_BYTES[90]:
                found[f"t{tile} {teams}x{stages}"] = one
    return found


class Planned:
    """Layers run by one variant, in scratch memory of its own."""

    def __init__(self, layers: Sequence[MarlinMoELayer], variant: DecodeVariant, *, rows: int) -> None:
        self.layers, self.variant, self.rows = layers, variant, rows
        plan = plan_workspace("cuda", LayerFacts.of(layers[0]), layers[0].device, rows=rows)
        memory = torch.empty(plan.nbytes, dtype=torch.uint8, device=layers[0].device)
        self.lease = Lease.lay_over(Scratch(StreamKey.current(layers[0].device), memory), plan)

    def __call__(self, index: int, x: torch.Tensor, routing: Routing, out: torch.Tensor) -> None:
        """The output of layer `index`, into `out`."""
        layer = self.layers[index]
        arguments = MoEArguments(
            x=x,
            layer=layer,
            topk_weights=routing.weights,
            topk_ids=routing.ids,
            activation=layer.activation,
            expert_map=None,
            apply_router_weight_on_input=False,
            routed_scaling_factor=1.0,
            out=None,
        )
        run_variant(self.variant, arguments, out, self.lease, rows=self.rows)


def lines(shape: LayerShape, form: WeightFormat, tokens: Sequence[int], protocol: Protocol) -> Iterator[str]:
    """A line for each number of tokens."""
    layers = [random_layer(shape, form) for _ in range(layer_count(shape, form))]
    facts = LayerFacts.of(layers[0])
    for count in tokens:
        rows = count * shape.top_k
        if rows > decode.max_rows(facts):
            yield f"{shape.name} {form.name} M={count}: more rows than the decode path takes"
            continue
        x = torch.randn(count, shape.hidden_size, device="cuda").bfloat16()
        routings = [random_routing(shape, tokens=count) for _ in layers]
        graphs, outs, refused = {}, dict[str, list[torch.Tensor]](), []
        for name, variant in alternatives(facts, rows=rows).items():
            outs[name] = [torch.empty_like(x) for _ in layers]
            planned = Planned(layers, variant, rows=rows)
            try:
                with watched(f"{shape.name} M={count} {name}", seconds=60):
                    graphs[name] = Replays(
                        partial(run_layers, planned, x, routings, outs[name]),
                        layers=len(layers),
                        protocol=protocol,
                    )
            except Exception as error:  # a plan that cannot run is a result, too
                refused.append(f"{name} refused ({type(error).__name__})")
        times = measure(graphs, protocol)
        base = times["chosen"].burst_us
        parts = [
            f"{name} {times[name].burst_us / base:.0%}{difference(outs['chosen'], outs[name])}"
            for name in graphs
            if name != "chosen"
        ]
        yield f"{shape.name} {form.name} M={count}: {base:.2f} us; " + ", ".join(parts + refused)


def run_layers(
    planned: Planned, x: torch.Tensor, routings: Sequence[Routing], outs: Sequence[torch.Tensor]
) -> None:
    """All layers, one after another."""
    for index, (routing, out) in enumerate(zip(routings, outs, strict=True)):
        planned(index, x, routing, out)


def difference(want: Sequence[torch.Tensor], got: Sequence[torch.Tensor]) -> str:
    """Nothing where all bits are equal, else the largest relative error."""
    if all(map(torch.equal, want, got)):
        return ""
    return f" (off by {max(map(relative_error, got, (one.double() for one in want))):.0e})"


def compile_ahead(shapes: Sequence[LayerShape], forms: Sequence[WeightFormat], tokens: Sequence[int]) -> int:
    """How many kernels are in the cache then."""
    specs = {
        build_spec(variant, ARCH)
        for shape in shapes
        for form in forms
        for facts in (LayerFacts.of(random_layer(shape, form, device="meta")),)
        for count in tokens
        if count * shape.top_k <= decode.max_rows(facts)
        for variant in alternatives(facts, rows=count * shape.top_k).values()
    }
    compile_all(specs, must_store=True)
    return len(specs)


@click.command(help=__doc__.partition("\n")[0])
@click.option("--shapes", default=",".join(SHAPES), callback=containing, help="Parts of names, with commas.")
@click.option(
    "--formats",
    default="int4",
    show_default=True,
    callback=formats_of,
    help=f"Some of {', '.join(FORMATS)}.",
)
@click.option("--tokens", default="1,2,4,8,16,32,64", show_default=True, callback=numbers)
@click.option("--compile", "only_compile", is_flag=True, help="Only fill the cubin cache; needs no GPU.")
@torch.no_grad()
def main(
    shapes: tuple[str, ...], formats: tuple[str, ...], tokens: tuple[int, ...], only_compile: bool
) -> None:
    """Compile, or measure and print."""
    chosen, forms = [SHAPES[name] for name in shapes], [FORMATS[name] for name in formats]
    if only_compile:
        click.echo(f"{compile_ahead(chosen, forms, tokens)} kernels in the cache")
        return
    for shape in chosen:
        for form in forms:
            for line in lines(shape, form, tokens, Protocol(samples=7)):
                click.echo(line)
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
