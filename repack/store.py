"""A source checkpoint -> a packed one, streamed, resumable, whole or absent: `repack_checkpoint`."""

import time
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from ..kernels.device import usable_device
from .blocks import BLOCK_BYTES, STREAM_BYTES
from .checkpoint import Checkpoint, shorten
from .errors import CheckpointError, MarlinMoEError, MarlinMoEWarning
from .model_path import model_path
from .native.path import native_path
from .packed.durable import canonical_json, digest
from .packed.journal import Journal, refuse_nested
from .packed.make_files import FileMaker
from .packed.names import MANIFEST, VERSION
from .packed.repack_plan import RepackPlan, plan_repack
from .progress import NoProgress, Progress
from .ranks import ALONE, Ranks
from .repack_run import RepackRun
from .workers import SharedProgress, worker_count


@dataclass(frozen=True, slots=True, kw_only=True)
class RepackReport:
    """What a repack did.

    Attributes:
        source, destination: directories.
        seconds: of this run.
        source_bytes, packed_bytes: of the safetensors files; of all files written.
        layers: MoE layers packed.
        files: files of the packed checkpoint, the manifest included.
        resumed_files: of those, finished by an earlier run and left as they were.
        already_complete: an earlier run had finished all of them.
        carried_tensors: tensors that are no routed experts.
        carried_files: companions copied: tokenizer, code, ….
        left_out: files of the source that were not copied: other weights, links to folders.
        native_path: what repacked the weights: the C loop, the CUDA kernel or torch operations.
        workers, ranks: files made at once by each process; processes.
        warnings: what was said.
    """

    source: str
    destination: str
    seconds: float
    source_bytes: int
    packed_bytes: int
    layers: int
    files: int
    resumed_files: int
    already_complete: bool
    carried_tensors: int
    carried_files: tuple[str, ...]
    left_out: tuple[str, ...]
    native_path: str
    workers: int
    ranks: int
    warnings: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def repack_checkpoint(
    src: str | Path,
    dst: str | Path,
    *,
    device: torch.device | str | int = "cpu",
    allow_dead_experts: bool = False,
    follow_links: bool = False,
    workers: int | None = None,
    ranks: Ranks = ALONE,
    block_bytes: int | None = None,
    progress: Progress | None = None,
) -> RepackReport:
    """Write the packed checkpoint of a source: experts in the Marlin layout, everything else unchanged.

    Memory stays at the blocks of experts in flight, whatever the size of a layer. Files get their names when
    they are complete, the manifest last. A stopped run resumes when it is called again, and redoes no
    finished file that is whole and of a source that is the same still. Where the finished packed checkpoint
    of the source is there nothing is written. The bytes do not depend on device, workers or ranks.

    Args:
        src: a source checkpoint, which is only read: a directory, or `org/model` on the Hugging Face Hub.
        dst: a directory that does not exist, is empty, or holds an interrupted or a finished run of the same
            source.
        device: where the stages run; the bytes are the same everywhere.
        allow_dead_experts: accept a projection whose scales are all zero.
        follow_links: follow links that lead out of the source's directory.
        workers: files made at once, by threads; by default one a core, on a GPU one.
        ranks: the processes that share the run (`ranks_from_environment`); each makes its share of the files.
        block_bytes: source bytes that the blocks of experts in flight hold, all workers together, and at
            least one expert each; on a GPU also the pinned memory. By default 32 MiB, on a GPU 128.
        progress: follows the bytes that this process writes.

    Raises:
        MarlinMoEError: a source that cannot be loaded, a destination that is taken, a fault of the system
            with its errno. What is left never loads.
    """
    started = time.monotonic()
    source, destination = model_path(src), Path(dst)
    target = usable_device(device)
    budget = block_bytes or (STREAM_BYTES if target.type == "cpu" else BLOCK_BYTES)
    shared = SharedProgress(progress or NoProgress())
    refuse_nested(source, destination)
    with Checkpoint(source, follow_links=follow_links) as checkpoint:
        alike = {"allow_dead_experts": allow_dead_experts}
        plan = _plan(checkpoint, ranks, alike, device=target, follow_links=follow_links)
        largest = max(layer.file.size_bytes // layer.facts.num_experts for layer in plan.layers)
        count = worker_count(workers, target, expert_bytes=largest)
        maker = FileMaker(
            checkpoint=checkpoint,
            plan=plan,
            journal=Journal(destination, _identity(plan), ranks=ranks, last_file=MANIFEST),
            progress=shared,
            allow_dead_experts=allow_dead_experts,
            block_bytes=budget // count,
            device=target,
        )
        run = RepackRun(maker=maker, ranks=ranks, workers=count, progress=shared)
        manifest, resumed = run.write()
        said = _left_out_warning(source, (*checkpoint.left_out, *plan.companions.left_out))
        return RepackReport(
            source=str(source),
            destination=str(destination),
            seconds=time.monotonic() - started,
            source_bytes=sum(file.size_bytes for file in checkpoint.files.values()),
            packed_bytes=manifest.size_bytes + len(manifest.as_bytes()),
            layers=len(plan.layers),
            files=len(manifest.file_names),
            resumed_files=resumed,
            already_complete=resumed == len(manifest.file_names),
            carried_tensors=sum(len(file.entries) for file in plan.rest),
            carried_files=plan.companions.names,
            left_out=tuple(sorted({*checkpoint.left_out, *plan.companions.left_out})),
            native_path=str(native_path(target)),
            workers=count,
            ranks=ranks.size,
            warnings=said,
        )


def _plan(
    checkpoint: Checkpoint, ranks: Ranks, alike: dict[str, Any], *, device: torch.device, follow_links: bool
) -> RepackPlan:
    """The plan, which all ranks must have alike, and so the options `alike`."""
    made: list[RepackPlan] = []

    def step() -> tuple[str, dict[str, Any]]:
        made.append(plan_repack(checkpoint, device=device, follow_links=follow_links))
        mtimes = {name: (size, mtime) for name, (size, mtime, _) in made[0].stamps.items()}
        return digest(canonical_json([_identity(made[0]), mtimes])), alike

    found = ranks.together(step)
    others = [str(rank) for rank, (identity, _) in enumerate(found) if identity != found[0][0]]
    if others:
        raise CheckpointError(
            f"{checkpoint.path}: expected all ranks to see the same source (names, sizes, headers, times of "
            f"change), got another one on rank {', '.join(others)} than on rank 0. Give all of them one "
            "directory."
        )
    for rank, (_, options) in enumerate(found):
        if options != found[0][1]:
            raise MarlinMoEError(
                f"rank {rank} of {ranks.size}: expected the options of rank 0, {found[0][1]}, because all "
                f"make one checkpoint, got {options}. Start all ranks with the same command."
            )
    return made[0]


def _identity(plan: RepackPlan) -> dict[str, Any]:
    """What has to be the same for a run to be resumed."""
    return {
        "purpose": "repack",
        "version": VERSION,
        "source": plan.source.fingerprint,
        "source_files": [file.name for file in plan.source.files],
    }


def _left_out_warning(source: Path, left_out: tuple[str, ...]) -> tuple[str, ...]:
    if not left_out:
        return ()
    text = (
        f"{source}: not copied, because they are no part of the checkpoint, weights in another format or "
        f"no regular files: {shorten(sorted(set(left_out)))}."
    )
    warnings.warn(text, MarlinMoEWarning, stacklevel=3)
    return (text,)
