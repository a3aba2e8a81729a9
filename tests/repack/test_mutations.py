"""A damaged checkpoint loads exactly right or is refused by a MarlinMoEError that names what is wrong.

MARLIN_MOE_EXAMPLES sets how many mutants are tried in all (default 3000); each is another one, the same at
every run.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings

from checkpoints import CheckpointSpec, write_checkpoint
from compare_layer import equal_bytes, same_layer
from marlin_moe import MarlinMoELayer, load_layers, repack_checkpoint, verify_checkpoint
from marlin_moe.kernels.errors import MarlinMoEError
from mutant_oracle import dense, packed_modules, read_tensors
from mutants import Files, Mutant, mutants
from mutants_packed import packed_mutants
from packed_files import MANIFEST

EXAMPLES = int(os.environ.get("MARLIN_MOE_EXAMPLES", "3000"))
SMALL = CheckpointSpec(num_experts=2, hidden_size=64, intermediate_size=64, extras=("router",), group_size=32)
FAST = settings(
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    report_multiple_bugs=False,
)


SPECS = {
    "plain": SMALL,
    "shards": replace(SMALL, shards=2, symmetric=False, num_layers=2),
    "act-order": replace(SMALL, actorder="group", naming="mixtral", symmetric=False),
    "8 bits, one scale per column": replace(SMALL, bits=8, group_size=None, text_config=True, num_experts=3),
    "gptq": replace(SMALL, storage="gptq", symmetric=False),
    "gptq, act-order": replace(SMALL, storage="gptq", actorder="group", shards=2),
    "awq": replace(SMALL, storage="awq", symmetric=False),
    "fused": replace(SMALL, storage="fused", symmetric=False, num_layers=2),
    "fused, nested": replace(SMALL, storage="fused-nested", shards=2),
}


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Tensors of a few hundred values are slower with more."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def files_of(path: Path) -> Files:
    return {file.name: file.read_bytes() for file in path.iterdir() if file.is_file()}


@contextmanager
def directory(files: Files) -> Iterator[Path]:
    """The files in a new directory, in memory where the system has one there."""
    memory = Path("/dev/shm")
    path = Path(tempfile.mkdtemp(dir=memory if os.access(memory, os.W_OK) else None))
    try:
        for name, raw in files.items():
            (path / name).write_bytes(raw)
        yield path
    finally:
        shutil.rmtree(path)


def outcome(mutant: Mutant, spec: CheckpointSpec) -> str:
    """Whether it is loaded or refused; AssertionError for wrong values, or an error without a name."""
    with directory(mutant.files) as path, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            layers = load_layers(path)
        except MarlinMoEError as error:
            text = str(error).replace(str(path), "")
            assert mutant.named_in(text), f"{mutant.done}: not named in: {text}"
            str(error).encode()
            return "refused"
    tensors = read_tensors(mutant.files)
    missed = packed_modules(tensors) - layers.keys()
    assert not missed, f"{mutant.done}: {missed} ignored"
    for module, layer in layers.items():
        expected = dense(tensors, module, spec, mutant.files)
        for name, got, want in zip(("w13", "w2"), layer.dequantize(), expected, strict=True):
            equal_bytes(got, want, f"{mutant.done}: {module}.{name}")
    return "loaded"


@pytest.mark.parametrize("name", SPECS)
def test_a_mutant_loads_right_or_is_refused_by_name(tmp_path: Path, name: str) -> None:
    write_checkpoint(tmp_path, SPECS[name])
    (tmp_path / "generation_config.json").unlink()  # nothing of it is read
    files, counts = files_of(tmp_path), Counter[str]()

    @settings(FAST, max_examples=max(10, EXAMPLES // len(SPECS)))
    @given(mutants(files))
    def each(mutant: Mutant) -> None:
        counts[outcome(mutant, SPECS[name])] += 1

    each()
    print(f"\n{name}: {dict(counts)}")
    assert counts["refused"] > counts["loaded"] > 0


# --- packed checkpoints

PACKED = ("plain", "shards", "act-order", "8 bits, one scale per column")


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Files]:
    """The files of a packed checkpoint of each spec."""
    found = {}
    for name in PACKED:
        path = tmp_path_factory.mktemp("packed")
        write_checkpoint(path / "source", SPECS[name])
        repack_checkpoint(path / "source", path / "packed")
        found[name] = files_of(path / "packed")
    return found


def packed_outcome(mutant: Mutant, intact: Files, expected: dict[str, MarlinMoELayer]) -> str:
    """As `outcome`; where a byte of the checkpoint's own files is another one, nothing may load or verify."""
    changed = [name for name, raw in intact.items() if mutant.files.get(name) != raw]
    strays = [name for name in mutant.files if name not in intact and name.endswith(".safetensors")]
    with directory(mutant.files) as path:
        found = verified(path)
        try:
            layers = load_layers(path, check=True)
        except MarlinMoEError as error:
            text = str(error).replace(str(path), "")
            assert mutant.named_in(text) or any(name in text for name in changed), f"{mutant.done}: {text}"
            assert found is not None, f"{mutant.done}: verify sees nothing wrong"
            found = found.replace(str(path), "")
            assert mutant.named_in(found) or any(name in found for name in changed), f"{mutant.done}: {found}"
            return "refused"
    same_content = changed == [MANIFEST] and json.loads(mutant.files[MANIFEST]) == json.loads(
        intact[MANIFEST]
    )
    assert not changed or same_content, f"{mutant.done}: loads although {changed} differ"
    assert (found is None) == (not strays), f"{mutant.done}: loads, but verify says {found}"
    assert layers.keys() == expected.keys()
    for name, layer in layers.items():
        same_layer(layer, expected[name])
    return "loaded"


def verified(path: Path) -> str | None:
    """What `verify` finds wrong, or None."""
    try:
        report = verify_checkpoint(path)
    except MarlinMoEError as error:
        return str(error)
    return None if report.ok else "\n".join(problem.message for problem in report.problems)


@pytest.mark.parametrize("name", PACKED)
def test_a_packed_mutant_is_refused_by_name(packed: dict[str, Files], name: str) -> None:
    files = packed[name]
    with directory(files) as path:
        expected = load_layers(path)
    counts: Counter[str] = Counter()

    @settings(FAST, max_examples=max(10, EXAMPLES // 3 // len(PACKED)))
    @given(packed_mutants(files))
    def each(mutant: Mutant) -> None:
        counts[packed_outcome(mutant, files, expected)] += 1

    each()
    print(f"\n{name}, packed: {dict(counts)}")
    assert counts["refused"] > counts["loaded"] > 0
