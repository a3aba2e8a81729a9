"""A checkpoint directory -> the CUDA kernels that its layers need, compiled ahead: `build_kernels`.

Reads headers only, and needs neither a GPU nor memory for the weights.
"""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ..kernels.backends.cuda_moe import specs as moe_specs
from ..kernels.jit.build import CompileReport, compile_all, compiling_is_forbidden
from .check import expert_facts
from .checkpoint import Checkpoint
from .errors import SchemeError
from .layers import moe_layers
from .model_path import model_path
from .native.cuda_repack import build_specs as repack_specs
from .packed.names import is_packed
from .packed.reader import PackedCheckpoint
from .rank_facts import CUDA_DTYPES, all_ranks
from .states import ExpertFacts, dtype_name


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelsReport:
    """What was compiled for a checkpoint, or found in the cache.

    Attributes:
        path: the directory.
        layers: MoE layers in it.
        archs: what was compiled for.
        tp, ep: the split that it is for.
        max_tokens, top_k: of the calls that it is for; top_k is None where the config names none, and then
            it is for any number of rows.
        kernels: one report for each variant and architecture.
    """

    path: str
    layers: int
    archs: tuple[str, ...]
    tp: int
    ep: int
    max_tokens: int
    top_k: int | None
    kernels: tuple[CompileReport, ...]

    def as_dict(self) -> dict[str, Any]:
        """The report for JSON."""
        return asdict(self)


def build_kernels(
    path: str | Path,
    archs: Iterable[str],
    *,
    tp: int = 1,
    ep: int = 1,
    max_tokens: int = 8192,
    top_k: int | None = None,
    dtype: torch.dtype | None = None,
) -> KernelsReport:
    """Compile all kernels that the CUDA backend can choose for any rank of a checkpoint's layers.

    Args:
        path: a source checkpoint or a packed one.
        archs: architectures as the compiler names them: `sm_80`, `sm_90a`.
        tp, ep: ranks that the layers are split over.
        max_tokens, top_k: as in `load_layers`: more rows than both make run in chunks. top_k is the config's
            by default.
        dtype: as in `load_layers`, where it is not the source's.

    Raises:
        MarlinMoEError: a checkpoint that cannot be loaded or split so; scales in float32 without `dtype`; a
            variable that says something impossible.
        JitError: a kernel did not compile or could not be stored, an architecture that NVRTC does not know,
            or the extra `cuda` is not installed.
    """
    compiling_is_forbidden()  # this may compile, but a word that other processes refuse is refused here too
    layers, config_top_k = layer_facts(path)
    slots = config_top_k if top_k is None else top_k
    rows = None if slots is None else max_tokens * slots
    unlike: dict[ExpertFacts, ExpertFacts] = {}  # most layers are alike; the first of a kind names errors
    for layer in layers:
        unlike.setdefault(replace(layer, module=""), layer)
    ranks = [
        facts for layer in unlike.values() for facts in all_ranks(_with_dtype(layer, dtype), tp=tp, ep=ep)
    ]
    listed = tuple(dict.fromkeys(archs))
    ahead = [
        spec
        for arch in listed
        for spec in (*moe_specs(((facts, rows) for facts in ranks), arch), *repack_specs(arch))
    ]
    reports = compile_all(ahead, must_store=True)
    return KernelsReport(
        path=str(path),
        layers=len(layers),
        archs=listed,
        tp=tp,
        ep=ep,
        max_tokens=max_tokens,
        top_k=slots,
        kernels=tuple(reports),
    )


def layer_facts(path: str | Path) -> tuple[list[ExpertFacts], int | None]:
    """(the facts of every WNA16 MoE layer of a directory, packed or not, its config's top_k)."""
    path = model_path(path)
    if is_packed(path):
        with PackedCheckpoint(path) as packed:
            return [layer.facts for layer in packed.layers()], packed.checkpoint.top_k
    with Checkpoint(path) as checkpoint:
        sources = moe_layers(checkpoint).values()
        return [expert_facts(source.experts, source.scheme) for source in sources], checkpoint.top_k


def _with_dtype(facts: ExpertFacts, dtype: torch.dtype | None) -> ExpertFacts:
    chosen = facts.scales_dtype if dtype is None else dtype
    if chosen not in CUDA_DTYPES:
        raise SchemeError(
            f"dtype: expected scales in BF16 or F16, which the CUDA backend computes in, got "
            f"{dtype_name(chosen)}. Give dtype= (--dtype), as to load_layers."
        )
    return replace(facts, scales_dtype=chosen)
