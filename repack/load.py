"""A checkpoint directory, packed or not -> its MoE layers on one rank."""

from collections.abc import Iterable
from pathlib import Path

import torch

from ..kernels.checks import check_type
from ..kernels.device import usable_device
from ..kernels.layer import WHOLE, MarlinMoELayer, Shard
from .checkpoint import Checkpoint
from .layers import moe_layers
from .model_path import model_path
from .packed.load import load_packed_layers
from .packed.names import is_packed
from .process import Recipe
from .scheme import QuantScheme


def load_layers(
    path: str | Path,
    device: torch.device | str | int = "cpu",
    *,
    tp: Shard = WHOLE,
    ep: Shard = WHOLE,
    dtype: torch.dtype | None = None,
    max_tokens: int = 8192,
    top_k: int | None = None,
    only: Iterable[str] | None = None,
    check: bool = False,
    allow_dead_experts: bool = False,
) -> dict[str, MarlinMoELayer]:
    """Module name -> `MarlinMoELayer` of every WNA16 MoE layer of a checkpoint directory.

    Args:
        path: a source checkpoint, which is repacked in memory, or a packed one, which is only read; or the
            name of one on the Hugging Face Hub (`org/model`). On a CPU the tensors of a packed one are maps
            of its files, which must stay as they are.
        device: where the layers lie.
        tp: this rank's slice of the intermediate size.
        ep: this rank's experts: rank q of size s has [q*E//s, (q+1)*E//s). Router ids stay global.
        dtype: of scales and bias (bfloat16, float16, float32); None keeps the source's.
        max_tokens: tokens that one pass of the op takes; more run in chunks.
        top_k: experts per token, for sizing the workspace; by default the config's.
        only: exact module names; all layers by default.
        check: also compare the hash of every tensor of a packed checkpoint.
        allow_dead_experts: accept a projection whose scales are all zero (experts that calibration never
            reached).

    Returns:
        Layers by their module's name in the checkpoint, e.g. `model.layers.3.mlp.experts`, in natural order.

    Raises:
        TypeError: an argument of another Python type.
        MarlinMoEError: anything that keeps a layer from being exactly right; all problems of a layer in one
            text.
    """
    target = usable_device(device)
    path = model_path(path)
    check_type("max_tokens", max_tokens, int)
    check_type("top_k", top_k, int, optional=True)
    if only is not None:
        only = _names(only)

    def recipe(module: str, scheme: QuantScheme, config_top_k: int | None) -> Recipe:
        return Recipe(
            scheme=scheme,
            module=module,
            tp=tp,
            ep=ep,
            dtype=dtype,
            max_tokens=max_tokens,
            top_k=config_top_k if top_k is None else top_k,
            allow_dead_experts=allow_dead_experts,
        )

    if is_packed(path):
        return load_packed_layers(path, target, recipe, only=only, check=check)
    with Checkpoint(path) as checkpoint:
        return {
            layer.name: recipe(layer.name, layer.scheme, checkpoint.top_k).run(layer.experts, target)
            for layer in moe_layers(checkpoint, only=only).values()
        }


def _names(only: Iterable[str]) -> tuple[str, ...]:
    """The module names asked for; TypeError for a str, whose characters would be taken for names."""
    if isinstance(only, str) or not isinstance(only, Iterable):
        found = f"{type(only).__name__} {only!r}"
        raise TypeError(f"only: expected an iterable of module names, got {found}. Pass a list of names.")
    names = tuple(only)
    for name in names:
        check_type("only: a name", name, str)
    return names
