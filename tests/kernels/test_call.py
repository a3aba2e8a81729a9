"""Which CUDA calls count as the same, and what their kernels are given; no GPU is asked."""

from typing import Any

import pytest
import torch

from marlin_moe import Activation
from marlin_moe.kernels.backends.cuda_arguments import as_it_lies, with_vector_rows
from marlin_moe.kernels.call import remembered
from random_layer import random_layer

X, WEIGHTS, IDS = torch.randn(4, 128), torch.rand(4, 2), torch.zeros(4, 2, dtype=torch.int64)
LAYER = random_layer()
MAP = torch.arange(5, dtype=torch.int32)


def key(
    x: Any = X,
    weights: Any = WEIGHTS,
    ids: Any = IDS,
    expert_map: Any = MAP,
    activation: Any = "silu",
    on_input: Any = False,
    scaling: Any = 1.0,
    backend: Any = None,
) -> tuple[Any, ...] | None:
    options = (activation, on_input, scaling, backend)
    found, ready = remembered({}, x, weights, ids, expert_map, options, (LAYER.w13, LAYER.w2))
    assert ready is None
    return found


def test_equal_calls_have_equal_keys() -> None:
    assert key() is not None
    assert key(X.clone(), WEIGHTS.clone(), IDS.clone(), MAP.clone()) == key()
    assert key(activation=Activation("silu_clamped", limit=2.0)) == key(
        activation=Activation("silu_clamped", limit=2.0)
    )


@pytest.mark.parametrize(
    "changed",
    [
        {"x": torch._neg_view(X)},
        {"weights": torch._neg_view(WEIGHTS)},
        {"ids": torch._neg_view(IDS)},
        {"expert_map": torch._neg_view(MAP)},
        {"expert_map": None},
        {"x": X.half()},
        {"weights": WEIGHTS.t().contiguous().t()},
        {"ids": IDS.int()},
        {"on_input": 0},
        {"on_input": True},
        {"scaling": 1},
        {"scaling": True},
        {"activation": "gelu"},
        {"backend": "cuda"},
    ],
    ids=lambda changed: ", ".join(changed),
)
def test_what_makes_a_call_another(changed: dict[str, Any]) -> None:
    assert key(**changed) is not None
    assert key(**changed) != key()


@pytest.mark.parametrize(
    "changed",
    [{"ids": [[0, 1]]}, {"weights": None}, {"expert_map": 3}, {"activation": ["silu"]}, {"backend": {}}],
    ids=str,
)
def test_wrong_types_have_no_key(changed: dict[str, Any]) -> None:
    assert key(**changed) is None


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
def test_layouts_without_strides_have_no_key() -> None:
    assert key(WEIGHTS.to_sparse_csr()) is None


@pytest.mark.parametrize("plain", [as_it_lies, with_vector_rows])
def test_kernels_are_given_bytes_that_are_the_values(plain: Any) -> None:
    for view in (torch._neg_view(X), X.t().contiguous().t(), torch._neg_view(X.t().contiguous().t())):
        lying = plain(view)
        assert not lying.is_neg()
        assert torch.equal(lying, view)
        words = torch.tensor([], dtype=torch.float32).set_(lying.untyped_storage())
        assert words.tolist() == view.flatten().tolist()
    assert plain(X) is X, "nothing is copied that lies so already"
