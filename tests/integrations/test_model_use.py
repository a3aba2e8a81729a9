"""A model of `load_model` in use: compiled, with static caches, moved, saved, and what it refuses."""

from __future__ import annotations

import copy
import json
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from edited_checkpoint import GOLDEN, edited
from hf_checkpoints import FAMILIES, Weights, weights_of, write_model
from marlin_moe import MarlinMoEError, MarlinMoEWarning, load_layers, repack_checkpoint
from marlin_moe.integrations.transformers import load_model

PROMPT = torch.tensor([[3, 99, 17, 201, 5, 64, 64, 130, 8]])
GREEDY = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}


@pytest.fixture
def model() -> Any:
    return load_model(GOLDEN, dtype=torch.float32)


def test_no_memory_is_taken_for_the_experts_weights(model: Any) -> None:
    layers = load_layers(GOLDEN)
    experts = [module for module in model.modules() if hasattr(module, "layer")]
    assert [m.layer.recipe.module for m in experts] == list(layers)
    assert not [name for name, _ in model.named_parameters() if "experts" in name]
    assert "8 experts, hidden_size=256" in repr(experts[0])
    assert model.config._experts_implementation == "marlin_moe"


def test_static_cache_gives_the_same_tokens(model: Any) -> None:
    expected = model.generate(PROMPT, **GREEDY)
    found = model.generate(PROMPT, **GREEDY, cache_implementation="static")
    torch.testing.assert_close(found, expected)


def test_compiles_without_a_graph_break(model: Any) -> None:
    """The op is one node of one graph."""
    expected = model(PROMPT).logits
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(model, fullgraph=True, backend=backend)
    torch.testing.assert_close(compiled(PROMPT).logits, expected, rtol=0, atol=0)
    ops = [str(node.target) for node in graphs[0].graph.nodes if "marlin_moe" in str(node.target)]
    assert len(graphs) == 1
    assert len(ops) == model.config.num_hidden_layers, ops


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_under_autocast(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Autocast computes router weights in another dtype than hidden states have."""
    model = load_model(write_model(tmp_path / "source", family), dtype=dtype)
    expected = model(PROMPT).logits.float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = model(PROMPT).logits.float()
    assert float((found - expected).norm() / expected.norm()) < 0.1


def test_save_is_refused_with_the_reason(model: Any, tmp_path: Path) -> None:
    with pytest.raises(MarlinMoEError, match=r"a saved one would lack its experts.*marlin-moe unpack"):
        model.save_pretrained(tmp_path / "saved")
    assert not (tmp_path / "saved").exists()
    with pytest.raises(MarlinMoEError, match=r"model.layers.0.mlp.experts.state_dict: expected"):
        model.state_dict()


def test_its_config_says_what_it_is(model: Any) -> None:
    found = json.loads(model.config.to_json_string())["quantization_config"]
    assert found == {"quant_method": "marlin_moe", "version": 1}
    assert model.config.name_or_path == str(GOLDEN)


@pytest.mark.filterwarnings("ignore:.*not copied, because they are no part of the checkpoint")
def test_from_pretrained_of_a_packed_directory_says_what_to_call(tmp_path: Path) -> None:
    """Without experts it would be filled with random ones."""
    from transformers import AutoModelForCausalLM

    repack_checkpoint(GOLDEN, tmp_path / "packed")
    with pytest.raises(MarlinMoEError, match=r"got a packed one.* Call .*load_model"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "packed")


def test_without_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(MarlinMoEError, match=r"pip install 'marlin-moe\[transformers\]'"):
        load_model(GOLDEN)


def test_a_copy_is_whole(model: Any, tmp_path: Path) -> None:
    """Pickled or copied, the experts go along."""
    expected = model(PROMPT).logits
    torch.save(model, tmp_path / "model.pt")
    saved = torch.load(tmp_path / "model.pt", weights_only=False)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), saved):
        torch.testing.assert_close(other(PROMPT).logits, expected, rtol=0, atol=0)


def test_converted_on_a_cpu(model: Any) -> None:
    expected = model(PROMPT).logits
    for method in (model.half, model.float):
        with pytest.raises(ValueError, match="not supported for quantized model"):
            method()
    found = model.to(torch.bfloat16)(PROMPT).logits
    assert found.dtype == torch.bfloat16
    assert float((found.float() - expected).norm() / expected.norm()) < 0.05


def test_moves_with_its_model(model: Any) -> None:
    assert model.to("meta").model.layers[0].mlp.experts.layer.device.type == "meta"


def test_no_other_implementation_takes_its_place(model: Any) -> None:
    model.set_experts_implementation("grouped_mm")
    with pytest.raises(MarlinMoEError, match=r"set_experts_implementation\('marlin_moe'\)"):
        model(PROMPT)
    model.set_experts_implementation("marlin_moe")
    assert model(PROMPT).logits.isfinite().all()


def test_a_missing_weight_is_an_error(tmp_path: Path) -> None:
    folder = edited(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(MarlinMoEError, match=r"expected every weight of Qwen3MoeForCausalLM.*model\.norm"):
        load_model(folder)


def test_what_the_model_has_no_place_for_is_named(tmp_path: Path) -> None:
    """A next-token layer behind the last one: its experts and its attention."""
    folder = edited(tmp_path, num_hidden_layers=1)
    with pytest.warns(MarlinMoEWarning, match=r"no place for 10 tensors or modules.*layers\.1\.mlp\.experts"):
        model = load_model(folder, dtype=torch.float32)
    assert len(model.model.layers) == 1
    assert model(PROMPT).logits.isfinite().all()


def test_experts_where_the_model_has_none(tmp_path: Path) -> None:
    folder = edited(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    moved = {name.replace(".mlp.experts.", ".moe.experts."): tensor for name, tensor in tensors.items()}
    save_file(moved, folder / "model.safetensors", metadata={"format": "pt"})
    expected = r"Qwen3MoeForCausalLM: expected experts modules where .*layers\.0\.moe\.experts"
    with pytest.raises(MarlinMoEError, match=expected):
        load_model(folder)


def test_other_sizes_than_the_configs_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(MarlinMoEError, match=r"model\.layers\.0\.mlp\.experts: expected \(experts, inter"):
        load_model(edited(tmp_path, moe_intermediate_size=64))


def test_other_formulas_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(MarlinMoEError, match=r"expected experts that apply silu, gelu.*Qwen3MoeExperts"):
        load_model(edited(tmp_path, hidden_act="relu"))


@pytest.mark.parametrize("act", ["gelu", "gelu_pytorch_tanh"])
def test_other_activations_that_the_op_has(act: str, tmp_path: Path) -> None:
    from exact_model import exact_model

    folder = edited(tmp_path, hidden_act=act)
    found, expected = load_model(folder, dtype=torch.float32)(PROMPT), exact_model(folder)(PROMPT)
    torch.testing.assert_close(found.logits, expected.logits, rtol=1e-4, atol=1e-4)


def test_a_model_that_transformers_does_not_have(tmp_path: Path) -> None:
    folder = edited(tmp_path, model_type="qwen99_moe", architectures=["Qwen99ForCausalLM"])
    with pytest.raises(MarlinMoEError, match=r"model_type 'qwen99_moe' of Qwen99ForCausalLM"):
        load_model(folder)


def test_another_name_of_a_model_that_it_has(tmp_path: Path) -> None:
    """kimi_k2 says DeepseekV3ForCausalLM: the class is known, the type is not."""
    source = write_model(tmp_path / "source", "deepseek_v3")
    expected = load_model(source, dtype=torch.float32)(PROMPT).logits
    config = json.loads((source / "config.json").read_text())
    published = {
        "model_type": "kimi_k2",
        "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
    }
    (source / "config.json").write_text(json.dumps(config | published))
    torch.testing.assert_close(load_model(source, dtype=torch.float32)(PROMPT).logits, expected)


def test_no_quantized_experts(tmp_path: Path) -> None:
    source = write_model(
        tmp_path / "source",
        "qwen3_moe",
        recipe=lambda name: None if ".experts." in name else weights_of(name, Weights()),
    )
    with pytest.raises(MarlinMoEError, match="expected routed experts with packed weights, got none"):
        load_model(source)


def test_attention_that_disagrees_with_the_config(tmp_path: Path) -> None:
    folder = edited(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.0.self_attn.q_proj.weight_scale"
    tensors[name] = tensors[name].repeat_interleave(2, dim=1)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(MarlinMoEError, match=rf"{name}: expected BF16 or F16 or F32 \(256, 2\).*\(256, 4\)"):
        load_model(folder)
