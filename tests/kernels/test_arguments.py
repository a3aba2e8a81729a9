"""Wrong arguments of the op: each is refused with what was expected and found, and nothing is written."""

import dataclasses
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from marlin_moe import MarlinMoEError, MarlinMoELayer, fused_marlin_moe
from random_layer import random_layer


def dense(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)


def ids_with(wrong: int) -> torch.Tensor:
    return torch.tensor([[0, 1], [2, 3], [4, wrong], [-1, 0]])


def expert_map(*local: int) -> torch.Tensor:
    return torch.tensor(local, dtype=torch.int32)


IDS, X = torch.zeros(4, 2, dtype=torch.int64), dense(4, 128)


def arguments(**changed: Any) -> dict[str, Any]:
    given = {"x": dense(4, 128), "layer": random_layer(), "topk_weights": dense(4, 2), "topk_ids": IDS}
    return given | changed


WRONG_VALUES: list[tuple[dict[str, Any], str]] = [
    ({"x": dense(4, 127)}, r"x: expected .*\[M, 128\].*got float32 \(4, 127\)"),
    ({"x": dense(128)}, r"x: expected .*got float32 \(128,\)"),
    ({"x": dense(1, 4, 128)}, r"x: expected .*got float32 \(1, 4, 128\)"),
    ({"x": dense(4, 128, dtype=torch.float64)}, r"x: expected bfloat16, float16 or float32.*got float64"),
    ({"x": dense(4, 128, device="meta")}, r"x: expected on cpu, where the layer is, got meta"),
    ({"x": dense(4, 128).to_sparse()}, r"x: expected a dense tensor, got torch.sparse_coo"),
    ({"x": dense(5, 128)}, r"topk_ids: expected int32 or int64 \[M=5, T\].*got int64 \(4, 2\)"),
    ({"topk_ids": IDS.short()}, r"topk_ids: expected int32 or int64 .*got int16"),
    ({"topk_ids": IDS[:, :0]}, r"topk_ids: .*T >= 1.*got int64 \(4, 0\)"),
    ({"topk_ids": IDS[:, 0]}, r"topk_ids: .*got int64 \(4,\)"),
    ({"topk_ids": IDS.to("meta")}, r"topk_ids: expected on cpu"),
    ({"topk_ids": ids_with(5)}, r"topk_ids: .*0 \.\. 4, because router ids are global.*got 5 at \[2, 1\]"),
    ({"topk_ids": ids_with(-2).int()}, r"topk_ids: .*got -2 at \[2, 1\]"),
    ({"topk_weights": dense(4, 3)}, r"topk_weights: expected float32 \(4, 2\) .*got float32 \(4, 3\)"),
    ({"topk_weights": dense(4, 2, dtype=torch.float16)}, r"topk_weights: expected float32 .*got float16"),
    ({"topk_weights": dense(4, 2, device="meta")}, r"topk_weights: expected on cpu"),
    ({"expert_map": expert_map(0, 1, 2, 3, 4, -1)}, r"expert_map: expected int32 \[5\].*int32 \(6,\)"),
    ({"expert_map": torch.arange(5)}, r"expert_map: expected int32 \[5\].*got int64 \(5,\)"),
    ({"expert_map": dense(5, dtype=torch.int32, device="meta")}, r"expert_map: expected on cpu"),
    ({"expert_map": expert_map(0, 1, 2, 3, 5)}, r"expert_map: .*the layer holds 5 experts, got 5 at \[4\]"),
    ({"activation": "relu2"}, r"activation: expected a gated kind.*gate and an up half, got relu2"),
    ({"activation": "tanh"}, r"activation: expected one of .*got 'tanh'"),
    ({"activation": "silu_clamped"}, r"activation silu_clamped: expected limit="),
    ({"routed_scaling_factor": float("nan")}, r"routed_scaling_factor: expected a finite number, got nan"),
    ({"out": dense(3, 128)}, r"out: expected float32 \(4, 128\) as x is, got float32 \(3, 128\)"),
    ({"out": dense(4, 128, dtype=torch.float16)}, r"out: expected float32 .*got float16"),
    ({"out": dense(4, 128, device="meta")}, r"out: expected on cpu"),
    ({"out": dense(128, 4).t()}, r"out: expected contiguous rows .*got strides \(1, 4\)"),
    ({"out": dense(1, 128).expand(4, 128)}, r"out: expected contiguous rows .*got strides \(0, 1\)"),
    ({"x": X, "out": X}, r"out: expected memory of its own.*overlaps x"),
    (
        {"backend": "marlin"},
        r"backend: expected .*one of cuda, triton, reference, got 'marlin'.\n  cuda: rejected, .*"
        r"\n  triton: rejected, .*\n  reference: acc",
    ),
]


@pytest.mark.parametrize(("changed", "message"), WRONG_VALUES, ids=[message for _, message in WRONG_VALUES])
def test_wrong_values(changed: dict[str, Any], message: str) -> None:
    given = arguments(**changed)
    out = given.setdefault("out", torch.full(given["x"].shape, 7.0, dtype=given["x"].dtype))
    before = None if out.device.type == "meta" else out.clone()
    with pytest.raises(MarlinMoEError, match=message):
        fused_marlin_moe(**given)
    assert before is None or torch.equal(out, before), "nothing is written"
    assert given["layer"].workspace.nbytes == 0


WRONG_TYPES: list[tuple[dict[str, Any], str]] = [
    ({"x": [[0.0]]}, r"x: expected Tensor, got list"),
    ({"layer": dense(1)}, r"layer: expected MarlinMoELayer, got Tensor"),
    ({"topk_weights": None}, r"topk_weights: expected Tensor, got NoneType"),
    ({"topk_ids": 3}, r"topk_ids: expected Tensor, got int"),
    ({"topk_ids": [[0, 1]]}, r"topk_ids: expected Tensor, got list \[\[0, 1\]\]"),
    ({"activation": None}, r"activation: expected a name or an Activation, got NoneType"),
    ({"activation": ["silu"]}, r"activation: expected a name or an Activation, got list"),
    ({"apply_router_weight_on_input": 1}, r"apply_router_weight_on_input: expected bool, got int"),
    ({"routed_scaling_factor": "2"}, r"routed_scaling_factor: expected int or float, got str"),
    ({"routed_scaling_factor": True}, r"routed_scaling_factor: expected int or float, got bool"),
    ({"expert_map": [0, 1]}, r"expert_map: expected Tensor or None, got list"),
    ({"out": "new"}, r"out: expected Tensor or None, got str"),
    ({"backend": 1}, r"backend: expected a name or None, got int 1"),
]


@pytest.mark.parametrize(("changed", "message"), WRONG_TYPES, ids=[message for _, message in WRONG_TYPES])
def test_wrong_types(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        fused_marlin_moe(**arguments(**changed))


@pytest.mark.parametrize(
    ("changed", "message"), [(c, m) for c, m in WRONG_TYPES if "backend" not in c], ids=str
)
def test_wrong_types_where_calls_are_remembered(
    changed: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on CUDA, where the call is looked up before it is checked."""
    given = arguments(**changed)
    monkeypatch.setattr(MarlinMoELayer, "device", property(lambda layer: torch.device("cuda", 0)))
    with pytest.raises(TypeError, match=message):
        fused_marlin_moe(**given)


@pytest.mark.parametrize(
    ("changed", "message"),
    [(c, m) for c, m in WRONG_TYPES if c.keys() & {"topk_ids", "routed_scaling_factor", "out", "expert_map"}],
    ids=str,
)
def test_wrong_types_in_a_traced_call(changed: dict[str, Any], message: str) -> None:
    given = arguments(**changed)
    with FakeTensorMode(allow_non_fake_inputs=True), pytest.raises(TypeError, match=message):
        fused_marlin_moe(**given)


def test_ids_are_checked_before_any_chunk_runs() -> None:
    layer = random_layer(max_tokens=1, top_k=2)
    out = torch.full((4, 128), 7.0)
    with pytest.raises(MarlinMoEError, match=r"got 5 at \[2, 1\]"):
        fused_marlin_moe(**arguments(layer=layer, topk_ids=ids_with(5), out=out))
    assert (out == 7).all()


def test_gradients_are_refused_unless_switched_off() -> None:
    given = arguments(x=torch.randn(4, 128), topk_weights=torch.rand(4, 2))
    want = fused_marlin_moe(**given)
    for name in ("x", "topk_weights"):
        asking = given | {name: given[name].clone().requires_grad_()}
        with pytest.raises(MarlinMoEError, match=rf"{name}: expected no gradient.*torch.no_grad\(\)"):
            fused_marlin_moe(**asking)
        with torch.no_grad():
            assert torch.equal(fused_marlin_moe(**asking), want)
        with torch.inference_mode():
            assert torch.equal(fused_marlin_moe(**asking), want)


def test_ungated_layer_with_a_gated_activation() -> None:
    with pytest.raises(MarlinMoEError, match=r"activation: expected an ungated .*has no gate, got silu"):
        fused_marlin_moe(**arguments(layer=random_layer(gated=False)))


def test_the_layers_own_map_is_checked() -> None:
    layer = random_layer(expert_map=expert_map(0, 1, 2, 3, 4))
    assert layer.expert_map is not None
    layer.expert_map[4] = 9  # after the layer looked at it
    with pytest.raises(MarlinMoEError, match=r"expert_map: .*the layer holds 5 experts, got 9 at \[4\]"):
        fused_marlin_moe(**arguments(layer=layer))


def test_a_layer_without_workspace() -> None:
    bare = dataclasses.replace(random_layer(), workspace=None)
    with pytest.raises(MarlinMoEError, match=r"layer: expected a workspace on cpu.*none.*with_workspace"):
        fused_marlin_moe(**arguments(layer=bare))
    fused_marlin_moe(**arguments(layer=bare.with_workspace()))


@pytest.mark.parametrize("first_row", [1, 3])
def test_out_overlaps_rows_of_x(first_row: int) -> None:
    buffer = torch.zeros(8, 128)
    with pytest.raises(MarlinMoEError, match="memory that overlaps x"):
        fused_marlin_moe(**arguments(x=buffer[:4], out=buffer[first_row : first_row + 4]))


def test_out_behind_x() -> None:
    buffer = torch.zeros(8, 128)
    given = arguments(x=buffer[:4], out=buffer[4:])
    assert fused_marlin_moe(**given) is given["out"]


def test_out_overlaps_columns_of_x() -> None:
    buffer = torch.zeros(4, 200)
    with pytest.raises(MarlinMoEError, match="memory that overlaps x"):
        fused_marlin_moe(**arguments(x=buffer[:, :128], out=buffer[:, 72:]))


def test_out_over_the_router_weights() -> None:
    buffer = torch.zeros(4, 130)
    with pytest.raises(MarlinMoEError, match="memory that overlaps topk_weights"):
        fused_marlin_moe(**arguments(topk_weights=buffer[:, 127:129], out=buffer[:, :128]))
    fused_marlin_moe(**arguments(topk_weights=buffer[:, 128:], out=buffer[:, :128]))


def test_out_over_the_expert_map() -> None:
    buffer = torch.zeros(4, 132)
    local = buffer.view(torch.int32)[2, 127:]
    layer = random_layer()
    with pytest.raises(MarlinMoEError, match="memory that overlaps expert_map"):
        fused_marlin_moe(**arguments(layer=layer, expert_map=local, out=buffer[:, :128]))
    local = torch.zeros(4, 133).view(torch.int32)[2, 128:]
    beside = local._base.view(torch.float32)[:, :128]  # type: ignore[union-attr]
    fused_marlin_moe(**arguments(layer=layer, expert_map=local, out=beside))


def tensor_names() -> list[str]:
    return [name for name, _ in layer_of_all_tensors().tensors()]


def layer_of_all_tensors() -> MarlinMoELayer:
    order = torch.arange(128, dtype=torch.int32).expand(5, 128).contiguous()
    layer = random_layer(
        symmetric=False,
        dtype=torch.float32,
        w13_sort_order=order,
        w13_bias=torch.zeros(5, 128),
        w2_bias=torch.zeros(5, 128),
        expert_map=torch.arange(128, dtype=torch.int32)[:5],
    )
    columns = torch.arange(64, dtype=torch.int32).expand(5, 64).contiguous()
    return dataclasses.replace(layer, intermediate_order=columns)


@pytest.mark.parametrize("name", tensor_names())
def test_out_over_the_layers_own_tensors(name: str) -> None:
    layer = layer_of_all_tensors()
    tensor = dict(layer.tensors())[name]
    words = torch.tensor([], dtype=torch.float32).set_(tensor.untyped_storage())
    out = words[:128].view(1, 128)
    before = tensor.clone()
    given = arguments(layer=layer, x=dense(1, 128), topk_weights=dense(1, 2), topk_ids=IDS[:1], out=out)
    shown = "expert_map" if name == "expert_map" else rf"layer\.{name}"
    with pytest.raises(MarlinMoEError, match=f"out: expected memory of its own.* that overlaps {shown}"):
        fused_marlin_moe(**given)
    assert torch.equal(tensor, before)


def test_out_between_the_rows_of_the_layers_memory() -> None:
    """Weights and results may lie in one buffer."""
    layer = random_layer(dtype=torch.float32)
    size = layer.w2.scales.numel()
    buffer = torch.zeros(size + 4 * 128)
    own = buffer[:size].view(layer.w2.scales.shape).copy_(layer.w2.scales)
    moved = dataclasses.replace(layer, w2=dataclasses.replace(layer.w2, scales=own))
    given = arguments(layer=moved, x=torch.randn(4, 128), topk_weights=torch.rand(4, 2))
    out = buffer[size:].view(4, 128)
    assert torch.equal(fused_marlin_moe(**given, out=out), fused_marlin_moe(**given | {"layer": layer}))
    with pytest.raises(MarlinMoEError, match=r"memory that overlaps layer\.w2\.scales"):
        fused_marlin_moe(**given, out=buffer[size - 1 : -1].view(4, 128))


def test_lazily_negated_tensors() -> None:
    given = arguments(x=torch.randn(4, 128), topk_weights=torch.rand(4, 2))
    want = fused_marlin_moe(**given)
    for name in ("x", "topk_weights"):
        assert torch.equal(fused_marlin_moe(**given | {name: torch._neg_view(-given[name])}), want)
    out = torch.zeros(4, 128)
    with pytest.raises(MarlinMoEError, match=r"out: expected a tensor whose bytes are its values.*negated"):
        fused_marlin_moe(**given, out=torch._neg_view(out))
    assert not out.any()


def test_a_scaling_factor_beyond_the_floats() -> None:
    with pytest.raises(MarlinMoEError, match="routed_scaling_factor: expected a finite number"):
        fused_marlin_moe(**arguments() | {"routed_scaling_factor": 10**400})
