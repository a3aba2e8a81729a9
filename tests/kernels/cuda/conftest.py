"""Where the bodies run: every backend on every device of this machine, at sizes that suit it."""

from collections.abc import Iterator

import pytest
import torch

from places import Place, force_path, hide_cuda_compiler, on_triton, places

PLACES = [
    pytest.param(place, id=str(place), marks=[pytest.mark.gpu] if place.device == "cuda" else [])
    for place in places()
]
if on_triton():
    hide_cuda_compiler()


@pytest.fixture(params=PLACES, scope="session")
def place(request: pytest.FixtureRequest) -> Place:
    chosen: Place = request.param
    return chosen


@pytest.fixture(autouse=True)
def forced_path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """All rows take the path of the place, if it has one."""
    if "place" in request.fixturenames and (path := request.getfixturevalue("place").path) is not None:
        force_path(monkeypatch, path)


@pytest.fixture(autouse=True)
def free_memory() -> Iterator[None]:
    """What a test leaves behind must not be in the way of the next one's measurements."""
    yield
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
