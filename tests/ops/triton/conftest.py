"""Every kernel test runs twice: under the interpreter (`make interp`) and on a GPU (`make gpu`)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.ops.triton.layers import poisoned

__all__ = ["device", "poisoned"]

DEVICES = [
    pytest.param("cpu", marks=pytest.mark.interpreter, id="interpreter"),
    pytest.param("cuda", marks=pytest.mark.gpu, id="gpu"),
]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> torch.device:
    """Where the kernels run; the reference runs on the CPU."""
    return torch.device(request.param)


def pytest_itemcollected(item: pytest.Item) -> None:
    """Tests of far-away memory take many GiB each: one process runs them all, one by one."""
    if item.path.stem == "test_far" or "beyond_two_to_the_31" in item.name:
        item.add_marker(pytest.mark.xdist_group("far"))
        item.add_marker(pytest.mark.usefixtures(_given_back.__name__))


@pytest.fixture
def _given_back() -> Iterator[None]:
    """Memory that a test took is there for other processes after it."""
    yield
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
