"""Options and configs that `load_model` refuses, and weights that a config does not fit."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from edited_checkpoint import GOLDEN, altered, edited
from marlin_moe import MarlinMoEError
from marlin_moe.integrations.transformers import load_model

PROMPT = torch.tensor([[3, 99, 17, 201, 5, 64, 64, 130, 8]])
OTHER_CLASSES = (
    *("AutoModel", "pipeline", "__name__", "Qwen3MoeConfig", "Qwen3MoeModel"),
    *("Qwen3MoeForSequenceClassification", "MixtralForCausalLM"),
)


def test_options_of_from_pretrained() -> None:
    model = load_model(GOLDEN, attn_implementation="eager")
    assert model.config._attn_implementation == "eager"
    with pytest.raises(MarlinMoEError, match=r"builds a Qwen3MoeForCausalLM of, attn_implementation='bogus'"):
        load_model(GOLDEN, attn_implementation="bogus")


@pytest.mark.parametrize(
    ("option", "instead"),
    [
        ({"revision": "main"}, r"Write path as org/model@revision\."),
        ({"device_map": "auto"}, r"Pass device=\."),
        ({"subfolder": "x"}, "into path"),
        ({"cache_dir": "/x"}, "HF_HUB_CACHE"),
        ({"max_memory": {0: 1}}, "one device"),
        ({"trust_remote_code": True}, "own code"),
        *(
            ({name: value}, "Leave it out")
            for name, value in {
                "variant": "fp16",
                "key_mapping": {"lm_head": "foo"},
                "use_safetensors": False,
                "ignore_mismatched_sizes": True,
                "offload_folder": "/x",
                "low_cpu_mem_usage": True,
                "num_hidden_layers": 1,
                "no_such_option": 1,
            }.items()
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_options_without_effect_are_refused(option: dict[str, Any], instead: str) -> None:
    """They would be ignored, and another model than the one asked for would answer."""
    (name,) = option
    with pytest.raises(
        TypeError, match=rf"expected options .*attn_implementation.*got {name}=\. .*{instead}"
    ):
        load_model(GOLDEN, **option)


@pytest.mark.parametrize("dtype", ["float32", "auto", {"": torch.float32}])
def test_a_dtype_is_torchs(dtype: Any) -> None:
    with pytest.raises(TypeError, match=r"dtype: expected torch\.bfloat16, .* got (str '|dict)"):
        load_model(GOLDEN, dtype=dtype)


def test_on_meta_there_is_nothing_to_run() -> None:
    with pytest.raises(MarlinMoEError, match=r"device: expected one that holds values.*got meta.*model\.to"):
        load_model(GOLDEN, device="meta")


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory's model is found in the directory."""

    def refused(*arguments: Any, **_: Any) -> None:
        raise AssertionError(f"connects to {arguments[1:]}")

    monkeypatch.setattr("socket.socket.connect", refused)
    monkeypatch.setattr("socket.getaddrinfo", refused)


@pytest.mark.usefixtures("no_network")
@pytest.mark.parametrize(
    ("changes", "found"),
    [
        *(
            (
                {"architectures": [name]},
                rf"class that generates text from a qwen3_moe .*ForCausalLM\), got {name}",
            )
            for name in OTHER_CLASSES
        ),
        *(
            ({"model_type": "foo", "architectures": [name]}, rf"got model_type 'foo' of {name}")
            for name in ("AutoModel", "pipeline", "Qwen3MoeConfig")
        ),
        ({"model_type": "vit", "architectures": ["ViTModel"]}, r"generates text, got ViTModel \(vit\)"),
        (
            {"architectures": "Qwen3MoeForCausalLM"},
            r"architectures a list of them, .* 'Qwen3MoeForCausalLM'\.",
        ),
        ({"architectures": [None]}, r"architectures a list of them, .*\[None\]"),
        ({"model_type": ["qwen3_moe"]}, r"model_type to be a string .*\['qwen3_moe'\]"),
        ({"num_hidden_layers": "2"}, r"takes for a qwen3_moe, .*'num_hidden_layers' expected int, got str"),
        ({"hidden_size": None}, r"takes for a qwen3_moe, .*'hidden_size' expected int"),
        ({"dtype": "foo"}, r"takes for a qwen3_moe, got an error from it: AttributeError: .*'foo'\. Mend"),
        ({"dtype": "float64"}, r"dtype bfloat16.* got torch\.float64\. Pass dtype="),
        ({"dtype": 5}, r"dtype bfloat16.* got 5\."),
        ({"hidden_act": "foo"}, r"builds a Qwen3MoeForCausalLM of, got an error from it: KeyError: .*foo"),
    ],
    ids=str,
)
def test_a_config_that_transformers_does_not_take(
    changes: dict[str, Any], found: str, tmp_path: Path
) -> None:
    with pytest.raises(MarlinMoEError, match=rf"config\.json: expected .*{found}"):
        load_model(edited(tmp_path, **changes))


@pytest.mark.usefixtures("no_network")
@pytest.mark.parametrize("text", ["{bad", "[]", "5"])
def test_a_broken_generation_config(text: str, tmp_path: Path) -> None:
    folder = edited(tmp_path)
    (folder / "generation_config.json").write_text(text)
    with pytest.raises(MarlinMoEError, match=r"generation_config\.json: expected .*Mend or remove the file"):
        load_model(folder)


@pytest.mark.parametrize(
    "changes", [{"architectures": ["Foo"]}, {"architectures": []}, {"architectures": None}]
)
def test_a_type_alone_says_which_model_it_is(changes: dict[str, Any], tmp_path: Path) -> None:
    expected = load_model(GOLDEN, dtype=torch.float32)(PROMPT).logits
    found = load_model(edited(tmp_path, **changes), dtype=torch.float32)
    torch.testing.assert_close(found(PROMPT).logits, expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("model.layers.0.mlp.gate.weight", (4, 256)),
        ("model.layers.1.mlp.gate.weight", (16, 256)),
        ("model.norm.weight", (1,)),
        ("model.layers.0.input_layernorm.weight", (1,)),
        ("model.embed_tokens.weight", (300, 256)),
        ("lm_head.weight", (100, 256)),
    ],
)
def test_a_plain_weight_of_another_shape(name: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    """Some of them broadcast, so that the model would run."""
    found = rf"{name}: expected \(.*\), which config\.json says, got {re.escape(str(shape))}.*fetch both"
    with pytest.raises(MarlinMoEError, match=rf"(?s){found}"):
        load_model(altered(tmp_path, **{name: torch.zeros(shape)}))


@pytest.mark.parametrize(
    ("key", "size", "name"),
    [
        ("num_attention_heads", 8, "q_proj"),
        ("num_key_value_heads", 1, "k_proj"),
        ("head_dim", 32, "q_proj"),
        ("vocab_size", 300, "embed_tokens"),
    ],
)
def test_a_config_of_other_sizes(key: str, size: int, name: str, tmp_path: Path) -> None:
    with pytest.raises(MarlinMoEError, match=rf"{name}\.weight: expected \(.*which config\.json says, got"):
        load_model(edited(tmp_path, **{key: size}))
