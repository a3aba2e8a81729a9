"""Every command and every example of the pages is run, in order, in a directory with what they name."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from contextlib import chdir
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from exact_model import exact_model
from hf_checkpoints import write_model, write_tokenizer
from layer_points import layer_point
from marlin_moe import repack_checkpoint
from marlin_moe.cli.bench_results import Measured, Results
from marlin_moe.cli.main import main
from marlin_moe.kernels import workspace
from marlin_moe.kernels.scratch import Registry
from pages import PAGES, blocks, page_name, run_python
from tree import ROOT

LAYERS, HIDDEN, TOKENS = 4, 128, 5
INTERMEDIATE = 512
"""Divisible by 8 x 64, as `--tp 8` asks for."""

BENCH = "--device cpu --prompts 4 --batches 1 --context 4 --steps 2"
SMALLER = {
    "bench model DST": BENCH,
    "bench model": f"{BENCH} --shape small --layers 1",
    "kernels build": "--max-tokens 1",
}
"""Added to commands that would take minutes, gigabytes or a GPU: of what fits first."""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("examples") / "SRC"
    sizes = {"num_hidden_layers": LAYERS, "moe_intermediate_size": INTERMEDIATE, "norm_topk_prob": True}
    write_model(folder, "qwen3_moe", **sizes)
    write_tokenizer(folder)
    return folder


@pytest.fixture
def place(source: Path, tmp_path: Path) -> Iterator[Path]:
    """The current directory: SRC, PATH (the same), RESULT.json; DST is for the commands to write."""
    for name in ("SRC", "PATH"):
        (tmp_path / name).symlink_to(source)
    point = layer_point({"ours": Measured(burst_us=20.0)})
    Results(machine={}, protocol={}, ceilings={}, points=[point]).write(tmp_path / "RESULT.json")
    with chdir(tmp_path):
        yield tmp_path


def commands(page: Path) -> list[list[str]]:
    """Every `marlin-moe` line of a page's shell blocks, as words behind the name."""
    lines = [line for block in blocks(page) if block.language == "bash" for line in block.text.splitlines()]
    words = [shlex.split(line, comments=True) for line in lines]
    return [line[1:] for line in words if line[:1] == ["marlin-moe"]]


WITH_COMMANDS = [page for page in PAGES if commands(page)]
WITH_PYTHON = [page for page in PAGES if any(b.language == "python" and not b.gpu for b in blocks(page))]


@pytest.mark.parametrize("page", WITH_COMMANDS, ids=page_name)
def test_commands(page: Path, place: Path) -> None:
    shown = commands(page)
    if not any(words[:1] == ["repack"] for words in shown):
        repack_checkpoint(place / "SRC", place / "DST")
    for words in shown:
        more = next(
            (more for name, more in SMALLER.items() if words[: len(name.split())] == name.split()), ""
        )
        result = CliRunner().invoke(main, [*words, *more.split()])
        assert result.exit_code == 0, f"marlin-moe {' '.join(words)}: {result.output}"
        if "-o" in words:
            assert (place / words[words.index("-o") + 1]).stat().st_size


@pytest.mark.parametrize("page", WITH_PYTHON, ids=page_name)
def test_python(page: Path, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks share names. The device is the CPU where there is no other; no other layers are on it."""
    monkeypatch.setattr(workspace, "registry", Registry())
    repack_checkpoint(place / "SRC", place / "DST")
    torch.manual_seed(0)
    names: dict[str, Any] = {
        "__name__": "example",
        "x": torch.randn(TOKENS, HIDDEN).bfloat16(),
        "topk_weights": torch.rand(TOKENS, 2),
        "topk_ids": torch.randint(8, (TOKENS, 2)),
    }
    for block in blocks(page):
        if block.language != "python" or block.gpu:
            continue
        text = block.text if torch.cuda.is_available() else block.text.replace('"cuda"', '"cpu"')
        run_python(page, text, names)


@pytest.mark.filterwarnings("ignore:scales are converted once")
def test_the_block_of_an_engine(source: Path) -> None:
    """Thirty lines that give what transformers gives with exact weights; also cut for two ranks."""
    from safetensors.torch import load_file

    page = ROOT / "docs" / "engines.md"
    (block, *_) = blocks(page)
    lines = [
        line for line in block.text.splitlines() if line.strip() and not line.startswith(("import", "from"))
    ]
    assert len(lines) <= 30
    names: dict[str, Any] = {"__name__": "example"}
    run_python(page, block.text, names)
    tensors = load_file(source / "model.safetensors")
    config = json.loads((source / "config.json").read_text())
    x = torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(0))
    expected = exact_model(source).model.layers[3].mlp(x[None])[0]
    tensors["model.layers.3.mlp.gate.weight"] = tensors["model.layers.3.mlp.gate.weight"].float()
    whole = names["MoEBlock"]("model.layers.3.mlp", tensors, config)
    torch.testing.assert_close(whole(x), expected, rtol=1e-4, atol=1e-4)
    ranks = [
        names["MoEBlock"]("model.layers.3.mlp", tensors, config, tp=names["Shard"](rank, 2))
        for rank in (0, 1)
    ]
    torch.testing.assert_close(sum(rank(x) for rank in ranks), expected, rtol=1e-4, atol=1e-4)

    other = {k: v for k, v in tensors.items() if k.startswith("model.layers.0.mlp.experts.")}
    whole.reload({k.removeprefix("model.layers.0.mlp.experts."): v for k, v in other.items()})
    assert not torch.allclose(whole(x), expected, rtol=1e-2, atol=1e-2)


def test_pages_have_what_is_run() -> None:
    """Blocks in other languages are pictures; a page whose fences were renamed would not be run."""
    assert len(WITH_COMMANDS) >= 3
    assert len(WITH_PYTHON) >= 6
    languages = {block.language for page in PAGES for block in blocks(page)}
    assert languages == {"", "bash", "python"}
