"""Tests marked `gpu` run where torch finds a CUDA device; elsewhere they are skipped with the reason."""

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked or torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device, and torch finds none")
    for item in marked:
        item.add_marker(skip)
