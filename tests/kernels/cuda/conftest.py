"""Where the bodies run: every backend on every device of this machine, at sizes that suit it."""

from collections.abc import Iterator

import pytest
import torch

from places import TOKENS, Place

PLACES = [
    pytest.param(Place(device="cpu", backend="reference"), id="cpu"),
    pytest.param(
        Place(device="cuda", backend="cuda", tokens=TOKENS, num_experts=16, hidden_size=512),
        id="cuda",
        marks=pytest.mark.gpu,
    ),
]


@pytest.fixture(params=PLACES, scope="session")
def place(request: pytest.FixtureRequest) -> Place:
    chosen: Place = request.param
    return chosen


@pytest.fixture(autouse=True)
def free_memory() -> Iterator[None]:
    """What a test leaves behind must not be in the way of the next one's measurements."""
    yield
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
