"""New expert weights in a running model: as if loaded from them, at the same addresses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from hf_checkpoints import write_model
from marlin_moe import MarlinMoEError, repack_checkpoint
from marlin_moe.integrations.transformers import expert_layers, load_model, update_weights

PROMPT = torch.tensor([[3, 99, 17, 201, 5, 64, 64, 130, 8]])


def experts_of(folder: Path) -> dict[str, torch.Tensor]:
    tensors = load_file(folder / "model.safetensors")
    return {name: tensor for name, tensor in tensors.items() if ".experts." in name}


@pytest.mark.parametrize("packed", [False, True])
def test_outputs_are_those_of_the_new_weights(packed: bool, tmp_path: Path) -> None:
    old = write_model(tmp_path / "old", "mixtral", seed=1)
    new = write_model(tmp_path / "new", "mixtral", seed=2)
    if packed:
        repack_checkpoint(old, tmp_path / "packed")
    model = load_model(tmp_path / "packed" if packed else old, dtype=torch.float32)
    reference = load_model(new, dtype=torch.float32)
    first = model(PROMPT).logits
    addresses = [t.data_ptr() for layer in expert_layers(model).values() for _, t in layer.tensors()]

    update_weights(model, experts_of(new))
    assert not torch.allclose(model(PROMPT).logits, first, rtol=1e-2, atol=1e-2)
    rest = dict(reference.named_parameters())
    for name, parameter in model.named_parameters():  # of everything else the old weights
        parameter.copy_(rest[name])
    torch.testing.assert_close(model(PROMPT).logits, reference(PROMPT).logits, rtol=0, atol=0)
    assert addresses == [t.data_ptr() for layer in expert_layers(model).values() for _, t in layer.tensors()]


def test_one_layer_alone(tmp_path: Path) -> None:
    old = write_model(tmp_path / "old", "qwen3_moe", seed=1)
    new = write_model(tmp_path / "new", "qwen3_moe", seed=2)
    model, reference = load_model(old), load_model(new)
    kept = expert_layers(model)["model.layers.1.mlp.experts"].w13.qweight.clone()
    update_weights(model, {k: v for k, v in experts_of(new).items() if ".layers.0." in k})
    found, expected = expert_layers(model), expert_layers(reference)
    name = "model.layers.0.mlp.experts"
    torch.testing.assert_close(found[name].w2.qweight, expected[name].w2.qweight, rtol=0, atol=0)
    torch.testing.assert_close(found["model.layers.1.mlp.experts"].w13.qweight, kept, rtol=0, atol=0)


def test_nothing_changes_where_a_layer_is_wrong(tmp_path: Path) -> None:
    """Names and shapes of every layer are looked at before the first one is written."""
    old = write_model(tmp_path / "old", "qwen3_moe", seed=1)
    tensors = experts_of(write_model(tmp_path / "new", "qwen3_moe", seed=2))
    model = load_model(old, dtype=torch.float32)
    before = model(PROMPT).logits
    scale = "model.layers.1.mlp.experts.7.down_proj.weight_scale"
    wrong = tensors | {scale: tensors[scale][:, :1]}
    with pytest.raises(MarlinMoEError, match=rf"{scale}: expected"):
        update_weights(model, wrong)
    lacking = {name: tensor for name, tensor in tensors.items() if name != scale}
    with pytest.raises(
        MarlinMoEError, match=r"layers\.1\.mlp\.experts: .* none of 7\.down_proj\.weight_scale"
    ):
        update_weights(model, lacking)
    strange = tensors | {"model.layers.1.self_attn.q_proj.weight": torch.zeros(1)}
    with pytest.raises(MarlinMoEError, match=r"got model\.layers\.1\.self_attn\.q_proj\.weight"):
        update_weights(model, strange)
    torch.testing.assert_close(model(PROMPT).logits, before, rtol=0, atol=0)


@pytest.mark.parametrize("fault", ["more experts", "fewer experts", "dtype", "meta"])
def test_nothing_changes_where_a_layer_would_be_another_one(fault: str, tmp_path: Path) -> None:
    """Tensors that fit one another and the scheme, but not the second layer as it is."""
    old = write_model(tmp_path / "old", "qwen3_moe", seed=1)
    tensors = experts_of(write_model(tmp_path / "new", "qwen3_moe", seed=2))
    model = load_model(old, dtype=torch.float32)
    before = model(PROMPT).logits
    second = {name: tensor for name, tensor in tensors.items() if ".layers.1." in name}
    last = {name: tensor for name, tensor in second.items() if ".experts.7." in name}
    if fault == "more experts":
        tensors |= {name.replace(".experts.7.", ".experts.8."): tensor for name, tensor in last.items()}
    elif fault == "fewer experts":
        tensors = {name: tensor for name, tensor in tensors.items() if name not in last}
    elif fault == "dtype":
        tensors |= {n: t.float() for n, t in second.items() if n.endswith("weight_scale")}
    else:
        tensors |= {name: tensor.to("meta") for name, tensor in last.items()}
    with pytest.raises(MarlinMoEError, match=r"model\.layers\.1\.mlp\.experts.*: expected"):
        update_weights(model, tensors)
    torch.testing.assert_close(model(PROMPT).logits, before, rtol=0, atol=0)


@pytest.mark.parametrize("left", ["3.", "7.", "3.up_proj.", "0.up_proj.", "3.up_proj.weight_scale"])
def test_what_was_not_passed_is_no_missing_shard(left: str, tmp_path: Path) -> None:
    source = write_model(tmp_path / "source", "qwen3_moe")
    tensors = {name: t for name, t in experts_of(source).items() if f".experts.{left}" not in name}
    one = {name: t for name, t in experts_of(source).items() if f".experts.{left}" in name}
    for some in (tensors, one):
        with pytest.raises(MarlinMoEError) as caught:
            update_weights(load_model(source), some)
        assert "shard" not in str(caught.value)


def test_a_model_loaded_in_inference_mode(tmp_path: Path) -> None:
    """Its tensors may be written too, inside that mode and outside."""
    old = write_model(tmp_path / "old", "qwen3_moe", seed=1)
    new = write_model(tmp_path / "new", "qwen3_moe", seed=2)
    with torch.inference_mode():
        model = load_model(old)
    update_weights(model, experts_of(new))
    for name, layer in expert_layers(load_model(new)).items():
        torch.testing.assert_close(expert_layers(model)[name].w2.qweight, layer.w2.qweight, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("tensors", "found"),
    [
        ([], r"tensors: expected a mapping .*got list"),
        ({1: torch.zeros(1)}, r"tensors: expected .*got int 1"),
        (
            {"model.layers.0.mlp.experts.0.up_proj.weight_scale": None},
            r"up_proj\.weight_scale: expected a torch\.Tensor, got NoneType",
        ),
    ],
)
def test_tensors_of_another_python_type(tensors: Any, found: str, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=found):
        update_weights(load_model(write_model(tmp_path / "old", "qwen3_moe")), tensors)


def test_values_that_no_layer_can_have_name_what_was_updated_before(tmp_path: Path) -> None:
    old = write_model(tmp_path / "old", "qwen3_moe", seed=1)
    tensors = experts_of(write_model(tmp_path / "new", "qwen3_moe", seed=2))
    scale = "model.layers.1.mlp.experts.7.down_proj.weight_scale"
    tensors[scale] = torch.full_like(tensors[scale], torch.nan)
    with pytest.raises(MarlinMoEError, match=r"layers\.1\.mlp\.experts\.7\.down_proj") as caught:
        update_weights(load_model(old), tensors)
    assert caught.value.__notes__ == ["These layers were updated before: model.layers.0.mlp.experts."]


def test_a_model_of_another_kind() -> None:
    with pytest.raises(MarlinMoEError, match=r"expected one of load_model.*got Linear"):
        update_weights(torch.nn.Linear(1, 1), {})
