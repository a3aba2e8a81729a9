"""The demo's proof, step by step: each step makes a claim, measures it, and says whether it holds."""

import hashlib
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, TypeAlias

import torch

from ..kernels.errors import MarlinMoEError
from ..kernels.layer import MarlinMoELayer, Shard
from ..repack.load import load_layers
from ..repack.store import repack_checkpoint
from ..repack.unpack import unpack_checkpoint
from ..repack.verify import verify_checkpoint
from .demo_call import TOKENS, OpCall, max_relative_error
from .demo_checkpoint import (
    HIDDEN_SIZE,
    INTERMEDIATE_SIZE,
    LAYERS,
    NUM_EXPERTS,
    Experts,
    exact_experts,
    write_demo_checkpoint,
)
from .output import bytes_text

Layers: TypeAlias = Mapping[str, MarlinMoELayer]
TP, EP = 2, 2
BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 5e-3}
"""Of the relative error of one token's output against float64, by the dtype of x."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProofStep:
    """A claim, whether it holds, the evidence in words and in numbers (bytes, relative errors, hashes)."""

    claim: str
    passed: bool
    evidence: str
    measured: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProofReport:
    """All steps; `directory` is where the files were left, or None."""

    steps: tuple[ProofStep, ...]
    seconds: float
    directory: str | None = None

    @property
    def ok(self) -> bool:
        """Whether every step passed."""
        return all(step.passed for step in self.steps)

    def as_dict(self) -> dict[str, Any]:
        """The report for JSON."""
        return {**asdict(self), "ok": self.ok}


def prove(directory: Path, *, kept: bool, say: Callable[[ProofStep], None]) -> ProofReport:
    """Makes a checkpoint below an empty `directory` and takes it the whole way; `say` hears of every step."""
    start = time.perf_counter()
    steps = []
    for step in _steps(directory):
        say(step)
        steps.append(step)
    return ProofReport(
        steps=tuple(steps),
        seconds=time.perf_counter() - start,
        directory=str(directory) if kept else None,
    )


def _steps(directory: Path) -> Iterator[ProofStep]:
    source, packed, unpacked = (directory / name for name in ("source", "packed", "unpacked"))
    yield _make(source)
    yield _repack(source, packed)
    yield _verify(packed, source)
    yield _unpack(packed, unpacked, source)
    yield _find_damage(packed, directory / "damaged")
    layers = load_layers(packed)
    yield _same_as_source(layers, load_layers(source))
    for layer in LAYERS:
        experts = exact_experts(source, layer)
        yield _dequantize(layers[layer.module], experts, layer.module)
        call = OpCall.random(experts)
        yield _run(layers[layer.module], call, layer.module)
        yield _run_ranks(packed, call, layer.module)


def _make(source: Path) -> ProofStep:
    total = write_demo_checkpoint(source)
    formats = "; ".join(f"layer {number} {layer}" for number, layer in enumerate(LAYERS))
    return ProofStep(
        claim=f"compressed-tensors {metadata.version('compressed-tensors')} made a checkpoint",
        passed=True,
        evidence=f"{bytes_text(total)}, {NUM_EXPERTS} experts {HIDDEN_SIZE} x {INTERMEDIATE_SIZE}; {formats}",
        measured={
            "num_layers": len(LAYERS),
            "num_experts": NUM_EXPERTS,
            "hidden_size": HIDDEN_SIZE,
            "intermediate_size": INTERMEDIATE_SIZE,
            "total_bytes": total,
        },
    )


def _repack(source: Path, packed: Path) -> ProofStep:
    report = repack_checkpoint(source, packed)
    return ProofStep(
        claim="its experts were repacked into the Marlin layout",
        passed=report.layers == len(LAYERS),
        evidence=f"{report.layers} layers, {bytes_text(report.packed_bytes)} in {report.files} files, "
        f"{report.seconds:.2f} s, by {report.native_path}",
        measured=report.as_dict(),
    )


def _verify(packed: Path, source: Path) -> ProofStep:
    report = verify_checkpoint(packed, source)
    return ProofStep(
        claim="inverted, the packed experts are the source's bytes, and every hash is right",
        passed=report.ok,
        evidence="; ".join(problem.message for problem in report.problems)
        or f"{report.tensors} packed tensors, {report.source_tensors} source tensors, "
        f"{report.source_bytes:,} bytes compared",
        measured=report.as_dict(),
    )


def _unpack(packed: Path, unpacked: Path, source: Path) -> ProofStep:
    unpack_checkpoint(packed, unpacked)
    hashes = {name: _file_hash(source / name) for name in sorted(f.name for f in source.iterdir())}
    differing = [n for n, value in hashes.items() if _file_hash(unpacked / n) != value]
    total = sum((source / name).stat().st_size for name in hashes)
    return ProofStep(
        claim="unpacked again, every file is the source's",
        passed=not differing,
        evidence=f"{', '.join(differing)} differ"
        if differing
        else f"{len(hashes)} files, {bytes_text(total)}, equal SHA-256",
        measured={"files": len(hashes), "compared_bytes": total, "differing": differing, "sha256": hashes},
    )


def _find_damage(packed: Path, damaged: Path) -> ProofStep:
    """A check that cannot fail proves nothing: one flipped bit has to be found."""
    shutil.copytree(packed, damaged)
    file = min(damaged.glob("experts-*.safetensors"))
    content = bytearray(file.read_bytes())
    position = len(content) - 1000
    content[position] ^= 1
    file.write_bytes(content)
    try:
        problems = [problem.message for problem in verify_checkpoint(damaged).problems]
    except MarlinMoEError as error:
        problems = [str(error)]
    shutil.rmtree(damaged)
    return ProofStep(
        claim="one flipped bit in a copy is found",
        passed=bool(problems),
        evidence=" ".join(problems[0].split()) if problems else f"{file.name}, byte {position}: not found",
        measured={"file": file.name, "byte": position, "problems": problems},
    )


def _same_as_source(packed: Layers, source: Layers) -> ProofStep:
    compared, differing = 0, sorted(packed.keys() ^ source.keys())
    digest = hashlib.sha256()
    for module in sorted(packed.keys() & source.keys()):
        ours, theirs = dict(packed[module].tensors()), dict(source[module].tensors())
        for name in sorted(ours.keys() | theirs.keys()):
            one, other = ours.get(name), theirs.get(name)
            if one is None or other is None or one.dtype != other.dtype or not torch.equal(one, other):
                differing.append(f"{module}.{name}")
                continue
            compared += one.nbytes
            digest.update(one.reshape(-1).view(torch.uint8).numpy().tobytes())
    return ProofStep(
        claim="loaded from the packed and from the source checkpoint, the layers are the same bytes",
        passed=not differing and compared > 0,
        evidence=f"{', '.join(differing)} differ"
        if differing
        else f"{compared:,} bytes, SHA-256 {digest.hexdigest()[:16]}…",
        measured={"compared_bytes": compared, "differing": differing, "sha256": digest.hexdigest()},
    )


def _dequantize(layer: MarlinMoELayer, experts: Experts, module: str) -> ProofStep:
    gate_up = torch.stack([torch.cat([gate, up]) for gate, up, _ in experts])  # [E, 2I, H]
    down = torch.stack([down for _, _, down in experts])  # [E, H, I]
    w13, w2 = (weights.double() for weights in layer.dequantize())
    differing = int((w13 != gate_up).sum() + (w2 != down).sum())
    total = gate_up.numel() + down.numel()
    return ProofStep(
        claim=f"{module}: the layer holds exactly what compressed-tensors decompresses",
        passed=differing == 0,
        evidence=f"{differing:,} of {total:,} weights differ",
        measured={"module": module, "weights": total, "differing": differing},
    )


def _run(layer: MarlinMoELayer, call: OpCall, module: str) -> ProofStep:
    errors = {dtype: call.error(layer, dtype) for dtype in BOUNDS}
    return ProofStep(
        claim=f"{module}: fused_marlin_moe agrees with float64",
        passed=all(error < BOUNDS[dtype] for dtype, error in errors.items()),
        evidence="largest relative error of a token: "
        + ", ".join(f"{_name(d)} {error:.1e} (< {BOUNDS[d]:.0e})" for d, error in errors.items()),
        measured={"module": module, "tokens": TOKENS}
        | {f"{_name(dtype)}_max_relative_error": error for dtype, error in errors.items()},
    )


def _run_ranks(packed: Path, call: OpCall, module: str) -> ProofStep:
    total = torch.zeros_like(call.expected)
    for tp_rank in range(TP):
        for ep_rank in range(EP):
            tp, ep = Shard(tp_rank, TP), Shard(ep_rank, EP)
            layer = load_layers(packed, tp=tp, ep=ep, only=[module])[module]
            total += call.run(layer, torch.float32).double()
    error = max_relative_error(total, call.expected)
    bound = BOUNDS[torch.float32]
    return ProofStep(
        claim=f"{module}: the {TP * EP} ranks of TP {TP} x EP {EP} add up to it",
        passed=error < bound,
        evidence=f"largest relative error of a token: float32 {error:.1e} (< {bound:.0e})",
        measured={"module": module, "tp": TP, "ep": EP, "float32_max_relative_error": error},
    )


def _file_hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "missing"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
