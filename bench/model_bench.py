"""Every variant of a model at every point: `measure_model`."""

import math
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import torch

from ..integrations.model_source import ModelSource
from ..integrations.transformers import load_model, require_transformers
from ..kernels.errors import MarlinMoEError
from ..repack.model_path import model_path
from .model_results import ModelResults, ModelRun
from .model_timing import graph_token_ms, token_ms, ttft_ms
from .model_variants import VARIANTS, put_variant, run_experts_as
from .random_checkpoint import SHAPES, write_checkpoint

if TYPE_CHECKING:
    from transformers import PreTrainedModel

REFERENCE_TOKENS = 256
"""The longest prompt, and the most tokens of a batch of prompts, that the reference backend is given."""
NO_TIME = "no time left"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelProtocol:
    """What is measured.

    Attributes:
        prompts: lengths of the prompts whose time to first token is taken.
        batches: sequences decoded side by side.
        context_tokens: of each of them before the first step.
        steps: decoded.
        repeats: runs of which a time to first token is the median.
        variants: of `VARIANTS`, in their order.
        max_tokens: tokens that one pass of the op takes.
        time_limit_s: from loading on; what would begin later is not measured.
    """

    prompts: tuple[int, ...] = (128, 2048, 8192)
    batches: tuple[int, ...] = (1, 8, 32)
    context_tokens: int = 128
    steps: int = 32
    repeats: int = 3
    variants: tuple[str, ...] = VARIANTS
    max_tokens: int = 8192
    time_limit_s: float = math.inf


@contextmanager
def checkpoint_of(
    path: Path | str | None, shape: str, layers: int | None, folder: Path | None
) -> Iterator[Path]:
    """The checkpoint at `path`, or one with random weights, which is removed afterwards.

    Raises:
        MarlinMoEError: no transformers; no room for random weights; no such model.
    """
    require_transformers()
    if path is not None:
        yield model_path(path)
        return
    with TemporaryDirectory(prefix="marlin-moe-bench-", dir=folder) as work:
        target = Path(work) / shape
        write_checkpoint(target, SHAPES[shape], layers)
        yield target


def measure_model(
    path: Path,
    *,
    device: torch.device,
    dtype: torch.dtype | None,
    protocol: ModelProtocol,
    tell: Callable[[str], None] = lambda line: None,
) -> ModelResults:
    """Load the model of a checkpoint once, and measure every variant of it; `tell` hears what is done next.

    Raises:
        MarlinMoEError: as `load_model`. What a variant cannot do, for want of memory or for another reason,
            is noted in its run instead.
    """
    deadline = time.monotonic() + protocol.time_limit_s
    with ModelSource(path) as source:
        packed_bytes = sum(entry.nbytes for entry in source.checkpoint.tensors.values())
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    tell(f"loading {path}")
    model = load_model(path, device=device, dtype=dtype, max_tokens=protocol.max_tokens)
    runs: list[ModelRun] = []
    first: dict[int, torch.Tensor] = {}
    for name in [variant for variant in VARIANTS if variant in protocol.variants]:
        tell(f"measuring {name}")
        run = ModelRun(variant=name)
        runs.append(run)
        reason = NO_TIME if time.monotonic() > deadline else _why_not(put_variant, model, name)
        if reason is not None:
            run.skipped["all"] = reason
            continue
        _measure(model, run, protocol, first, deadline)
    text = model.config.get_text_config()
    return ModelResults(
        machine=machine(device),
        checkpoint={
            "name": Path(path).name,
            "model": type(model).__name__,
            "layers": text.num_hidden_layers,
            "dtype": str(model.dtype).removeprefix("torch."),
            "packed_bytes": packed_bytes,
        },
        protocol={
            "context_tokens": protocol.context_tokens,
            "steps": protocol.steps,
            "repeats": protocol.repeats,
            "max_tokens": protocol.max_tokens,
        },
        runs=runs,
    )


def _measure(
    model: "PreTrainedModel",
    run: ModelRun,
    protocol: ModelProtocol,
    first: dict[int, torch.Tensor],
    deadline: float,
) -> None:
    """Fill a run until the deadline; `first` holds the tokens of the first variant at each batch."""
    device = model.device
    if device.type == "cuda":
        run.weights_bytes = torch.cuda.memory_allocated(device)
        if first:  # the first variant's peak is also that of loading
            torch.cuda.reset_peak_memory_stats(device)

    def ttft(tokens: int) -> None:
        run.ttft_ms[tokens] = ttft_ms(model, tokens, protocol.repeats)

    def token(batch: int) -> None:
        run.token_ms[batch], found = token_ms(model, batch, protocol.context_tokens, protocol.steps)
        same = torch.equal(first.setdefault(batch, found), found)
        run.same_tokens = same if run.same_tokens is None else run.same_tokens and same

    def graph(batch: int) -> None:
        with _decoding_experts(model, run.variant):
            run.graph_token_ms[batch] = graph_token_ms(model, batch, protocol.context_tokens, protocol.steps)

    for tokens in protocol.prompts:
        _attempt(run, "ttft", tokens, ttft, tokens=tokens, device=device, deadline=deadline)
    for kind, measure in (("token", token), ("graph", graph)):
        for batch in protocol.batches:
            total = batch * protocol.context_tokens
            _attempt(run, kind, batch, measure, tokens=total, device=device, deadline=deadline)
    if device.type == "cuda":
        run.peak_bytes = torch.cuda.max_memory_allocated(device)


def _attempt(
    run: ModelRun,
    kind: str,
    size: int,
    measure: Callable[[int], None],
    *,
    tokens: int,
    device: torch.device,
    deadline: float,
) -> None:
    """Measure a point of a run, or note there why not."""
    reason = None
    if kind == "graph" and device.type != "cuda":
        reason = f"no graphs on {device.type}"
    elif kind == "graph" and run.variant == "reference":
        reason = "asks the host in between"
    elif run.variant == "reference" and tokens > REFERENCE_TOKENS:
        reason = f"more than {REFERENCE_TOKENS} tokens"
    elif time.monotonic() > deadline:
        reason = NO_TIME
    if reason is None:
        reason = _why_not(measure, size)
    if reason is not None:
        run.skipped[f"{kind} {size}"] = reason


def _why_not(attempt: Callable[..., str | None], *arguments: object) -> str | None:
    """What an attempt says, or the first line of what it raises; None where it went well.

    A model runs code of torch and transformers that raises errors of any type, and what has been measured
    outlives them all.
    """
    try:
        return attempt(*arguments)
    except MarlinMoEError as error:
        return str(error).splitlines()[0]
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]


@contextmanager
def _decoding_experts(model: "PreTrainedModel", variant: str) -> Iterator[None]:
    """transformers' own experts as generate() runs them while it decodes; ours are the same everywhere."""
    if variant != "dequantized":
        yield
        return
    run_experts_as(model, "batched_mm")
    try:
        yield
    finally:
        run_experts_as(model, "grouped_mm")


def machine(device: torch.device) -> dict[str, str]:
    """Device and versions."""
    cuda = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if cuda else platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        "transformers": metadata.version("transformers"),
        "marlin_moe": metadata.version("marlin-moe"),
    }
