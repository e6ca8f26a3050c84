"""The kernels of a CPU, compiled where there is a compiler. Each test runs with every instruction set that this machine has: with the best
one in all cases, with the others, which differ from it in their products alone, in every eighth (--all: in all)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from mtpserve_kernels.cpu.build import available
from mtpserve_kernels.cpu.library import Unavailable, library, using

from tests import selection

EVERY = 8


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if selection.ALL:
        return
    left, seen = list[pytest.Item](), Counter[str]()
    for item in items:
        isa = getattr(item, "callspec", None) and item.callspec.params.get("isa")  # type: ignore[attr-defined]
        if isa is None or Path(__file__).parent not in item.path.parents or isa.name == available()[0].name:
            continue
        case = f"{item.nodeid.partition('[')[0]} {isa.name}"
        if seen[case] % EVERY:
            left.append(item)
        seen[case] += 1
    config.hook.pytest_deselected(items=left)
    gone = set(map(id, left))
    items[:] = [item for item in items if id(item) not in gone]


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
