"""Models of `load_model` on a GPU: bf16 against float32, generate() compiled, graphs over new weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from bf16_logits import PROMPTS, check_bf16_logits
from child import in_child
from exact_model import exact_model
from folders import checkpoint_folders
from hf_checkpoints import FAMILIES, write_model
from marlin_moe.bench.model_bench import ModelProtocol, measure_model
from marlin_moe.bench.model_timing import StaticDecode
from marlin_moe.bench.random_checkpoint import SHAPES, write_checkpoint
from marlin_moe.integrations.transformers import expert_layers, load_model, update_weights

pytestmark = pytest.mark.gpu


@pytest.mark.filterwarnings("ignore:scales are converted once")  # AWQ's are fp16
@pytest.mark.parametrize("folder", checkpoint_folders(), ids=lambda path: path.name)
def test_checkpoints_of_the_public_tools_in_bf16(folder: Path) -> None:
    model = load_model(folder, device="cuda", dtype=torch.bfloat16)
    assert {p.device.type for p in model.parameters()} == {"cuda"}
    assert {layer.device.type for layer in expert_layers(model).values()} == {"cuda"}
    check_bf16_logits(model, exact_model(folder))


@pytest.mark.parametrize("family", FAMILIES)
def test_families_of_models_in_bf16(family: str, tmp_path: Path) -> None:
    source = write_model(tmp_path / "source", family)
    check_bf16_logits(load_model(source, device="cuda"), exact_model(source))


@pytest.mark.filterwarnings("default")  # what torch and transformers say of each other when they compile
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_generate_compiles_its_steps_over_a_static_cache(family: str, tmp_path: Path) -> None:
    """transformers compiles decoding by itself for such a cache: reduce-overhead, so CUDA graphs.

    A compiled attention rounds otherwise, so a token may be another where two are as likely: the model as it
    is must find nearly all of them the likeliest.
    """
    model = load_model(write_model(tmp_path / "source", family), device="cuda")
    prompts, steps = PROMPTS.cuda(), 8
    found = model.generate(
        prompts, min_new_tokens=steps, max_new_tokens=steps, do_sample=False, cache_implementation="static"
    )
    assert hasattr(model, "_compiled_call"), "it was not compiled"
    with torch.no_grad():
        logits = model(found).logits[:, -steps - 1 : -1].float()
    chosen = logits.gather(2, found[:, -steps:, None]).squeeze(2)
    near = logits.amax(2) - chosen < 0.1 * logits.std(2)
    assert near.float().mean() > 0.8, (found, near)


def experts_of(folder: Path) -> dict[str, torch.Tensor]:
    tensors = load_file(folder / "model.safetensors")
    return {name: tensor for name, tensor in tensors.items() if ".experts." in name}


def test_captured_graphs_follow_new_weights(tmp_path: Path) -> None:
    """The case of reinforcement learning: weights change under graphs that were captured before."""
    old = write_model(tmp_path / "old", "qwen3_moe", seed=1)
    new = write_model(tmp_path / "new", "qwen3_moe", seed=2)
    model = load_model(old, device="cuda")
    ids = PROMPTS.cuda()
    model(ids, use_cache=False)  # attention chooses its kernels outside of the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = model(ids, use_cache=False).logits
    graph.replay()
    before = logits.clone()
    assert torch.equal(before, model(ids, use_cache=False).logits)

    update_weights(model, experts_of(new))
    graph.replay()
    torch.cuda.synchronize()
    after = logits.clone()
    assert torch.equal(after, model(ids, use_cache=False).logits)
    assert not torch.allclose(after, before, rtol=0.05, atol=0.05)
    update_weights(model, experts_of(old))
    graph.replay()
    assert torch.equal(logits, before)


@in_child(timeout_s=200)
def test_a_captured_step_decodes_as_generate_does() -> None:
    """The step that the benchmark replays, as the first capture of a process."""
    from tempfile import TemporaryDirectory

    with TemporaryDirectory() as work:
        write_checkpoint(Path(work) / "model", SHAPES["small"])
        model = load_model(Path(work) / "model", device="cuda")
    prompts = PROMPTS.cuda()
    eager, captured = (StaticDecode(model, prompts, 12) for _ in range(2))
    for decode in (eager, captured):
        decode.step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured.step()
    for _ in range(8):
        eager.step()
        graph.replay()
        assert torch.equal(eager.token, captured.token)


def test_the_benchmark_measures_every_variant(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "model", SHAPES["small"])
    protocol = ModelProtocol(prompts=(16, 64), batches=(1, 4), context_tokens=16, steps=4, repeats=1)
    results = measure_model(tmp_path / "model", device=torch.device("cuda"), dtype=None, protocol=protocol)
    runs = {run.variant: run for run in results.runs}
    for name in ("persistent", "per-call", "dequantized"):
        run = runs[name]
        assert not run.skipped, run.skipped
        assert run.ttft_ms.keys() == {16, 64}
        assert run.token_ms.keys() == run.graph_token_ms.keys() == {1, 4}
        assert run.peak_bytes is not None
        assert run.weights_bytes is not None
        assert run.peak_bytes >= run.weights_bytes > results.checkpoint["packed_bytes"]
    assert runs["per-call"].same_tokens
    assert runs["reference"].ttft_ms.keys() == {16, 64}
