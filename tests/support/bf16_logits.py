"""Logits of a bf16 model beside the exact ones, every token sent to the same experts: `check_bf16_logits`.

In bf16 a near tie of the router's logits sends a token to another expert than in float32, and what follows
differs by much though both are right. So the experts of both bf16 models get the exact model's routing; what
their own routers chose is compared beside that, where a few near ties are no fault.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

PROMPTS = torch.tensor([[3, 99, 17, 201, 5, 64, 64, 130, 8], [250, 1, 77, 30, 30, 211, 9, 45, 163]])
TOKEN_ERROR = 0.05
"""Of any token's logits, relative: bf16 gives up to 0.036, one expert's w13 times 1.25 mostly over 0.1."""
WEIGHT_ERROR = 0.05
"""Of the router weights of any token, relative; bf16 gives up to 0.02."""
LEAST_AGREEMENT = 0.75
"""Of the tokens, at least so many are routed alike in each layer; of 18, near ties took up to two."""

Routing = dict[str, tuple[torch.Tensor, torch.Tensor]]
"""Name of an experts module -> its top-k experts [M, T] and their weights [M, T]."""


def check_bf16_logits(model: Any, reference: Any) -> None:
    """Fail unless a bf16 model is as near to the exact one, token by token, as bf16 allows.

    `reference` is the float32 model, and is converted. Where bf16 itself is far off (a linear attention with
    large random weights), the limit is what transformers' own bf16 model has, and a half.
    """
    with recorded(reference) as exact:
        expected = reference(PROMPTS).logits
    with recorded(model, forced=exact) as chosen:
        found = model(PROMPTS.to(model.device)).logits.float().cpu()
    with recorded(reference.to(torch.bfloat16), forced=exact) as usually_chosen:
        rounded = reference(PROMPTS).logits.float()
    assert exact, "no experts module was called"
    assert chosen.keys() == exact.keys()

    errors, usual = token_errors(found, expected), token_errors(rounded, expected)
    limit = max(TOKEN_ERROR, 1.5 * float(usual.max()))
    assert errors.max() < limit, f"limit {limit:.3f}, got {errors.tolist()}, transformers {usual.tolist()}"
    for name, routing in exact.items():
        check_routing(name, chosen[name], usually_chosen[name], routing)


@contextmanager
def recorded(model: Any, *, forced: Routing | None = None) -> Iterator[Routing]:
    """What the routers of a model choose in a forward; `forced` is what its experts get instead."""
    chosen: Routing = {}

    def record(name: str) -> Any:
        def hook(module: Any, arguments: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...] | None:
            x, experts, weights = arguments
            chosen[name] = experts.cpu(), weights.float().cpu()
            if forced is None:
                return None
            other_experts, other_weights = forced[name]
            return x, other_experts.to(experts), other_weights.to(weights)

        return hook

    hooks = [
        module.register_forward_pre_hook(record(name))
        for name, module in model.named_modules()
        if name.endswith(".experts")
    ]
    try:
        yield chosen
    finally:
        for hook in hooks:
            hook.remove()


def check_routing(
    name: str,
    found: tuple[torch.Tensor, torch.Tensor],
    usual: tuple[torch.Tensor, torch.Tensor],
    exact: tuple[torch.Tensor, torch.Tensor],
) -> None:
    """Fail unless a router sends most tokens where the exact one does, weighted as in any bf16 model."""
    agree, error = routing_error(found, exact)
    assert agree >= LEAST_AGREEMENT, f"{name}: {agree:.0%} of the tokens routed as exactly"
    limit = max(WEIGHT_ERROR, 1.5 * routing_error(usual, exact)[1])
    assert error < limit, f"{name}: router weights off by {error:.3f}, limit {limit:.3f}"


def routing_error(
    found: tuple[torch.Tensor, torch.Tensor], exact: tuple[torch.Tensor, torch.Tensor]
) -> tuple[float, float]:
    """(share of tokens with the same experts, the largest relative error of their weights)."""
    (experts, weights), (exact_experts, exact_weights) = in_order(found), in_order(exact)
    same = (experts == exact_experts).all(-1)
    errors = token_errors(weights[same], exact_weights[same])
    return float(same.float().mean()), float(errors.max()) if len(errors) else 0.0


def in_order(routing: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """By expert number: near ties also change the order, which means nothing."""
    experts, order = routing[0].sort(-1)
    return experts, routing[1].gather(-1, order)


def token_errors(found: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Relative error of each vector."""
    return (found - expected).norm(dim=-1) / expected.norm(dim=-1)
