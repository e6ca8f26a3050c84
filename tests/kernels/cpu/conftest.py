"""The kernels of a CPU, compiled where there is a compiler; each test runs with every instruction set that this machine has."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from mtpserve_kernels.cpu.build import available
from mtpserve_kernels.cpu.library import Unavailable, library, using


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cpu")


@pytest.fixture(autouse=True, params=available() or [None], ids=lambda isa: isa.name if isa else "none")
def isa(request: pytest.FixtureRequest) -> Iterator[None]:
    try:
        library()
    except Unavailable as reason:
        pytest.skip(str(reason))
    with using(request.param):
        yield


@pytest.fixture
def with_threads() -> Iterator[Callable[[int, Callable[[], Any]], Any]]:
    """with_threads(n, f): what f returns with n of torch's threads."""
    before = torch.get_num_threads()

    def run(threads: int, function: Callable[[], Any]) -> Any:
        torch.set_num_threads(threads)
        return function()

    yield run
    torch.set_num_threads(before)
