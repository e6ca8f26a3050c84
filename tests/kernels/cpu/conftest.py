"""The kernels of a CPU, compiled where there is a compiler. Each test runs with the best instruction set of this machine in all cases, and
in every eighth with AVX2, whose vectors are shorter. The others differ from these in their products alone: tests of products and of single
vectors run with an object of linear.cpp, emulated where the machine lacks the set. --all: all cases with each set that it has."""

from __future__ import annotations

import ctypes
import os
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from mtpserve_kernels.cpu import build, library
from mtpserve_kernels.cpu.build import InstructionSet, available

from tests import selection
from tests.kernels.cpu.objects import emulated_sets, missing

EVERY = 8
WHOLE = {*(isa.name for isa in available()[:1]), "avx2"}
EMULATED = ("avx512_bf16", "avx512_amx", "neon")
TESTS_OF_PRODUCTS = ("test_linear.py", "test_vec.py")


def instruction_sets() -> list[InstructionSet]:
    here = available()
    if selection.ALL or not here:
        return here
    lacking = {isa.name for isa in build.INSTRUCTION_SETS} - {isa.name for isa in here}
    return [*here, *(isa for name, isa in emulated_sets().items() if name in EMULATED and name in lacking)]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if selection.ALL:
        return
    left, seen = list[pytest.Item](), Counter[str]()
    for item in items:
        isa = getattr(item, "callspec", None) and item.callspec.params.get("isa")  # type: ignore[attr-defined]
        if isa is None or Path(__file__).parent not in item.path.parents or isa.name == available()[0].name:
            continue
        case = f"{item.nodeid.partition('[')[0]} {isa.name}"
        if seen[case] % EVERY or (isa.name not in WHOLE and item.path.name not in TESTS_OF_PRODUCTS):
            left.append(item)
        seen[case] += 1
    config.hook.pytest_deselected(items=left)
    gone = set(map(id, left))
    items[:] = [item for item in items if id(item) not in gone]


@cache
def products(isa: InstructionSet) -> library.Library:
    """An object of linear.cpp alone: all sources take five times as long."""
    if isa.name in emulated_sets() and isa not in available() and (reason := missing(isa.name)) is not None:
        pytest.skip(reason)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "sources", lambda pattern: sorted(build.SOURCES.glob(pattern.replace("*.cpp", "linear.cpp"))))
        path = build.object_of(isa, ("-O1",))
    library.openmp()
    return library.Library(isa, ctypes.CDLL(str(path), mode=os.RTLD_NOW))


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cpu")


@pytest.fixture(autouse=True, params=instruction_sets() or [None], ids=lambda isa: isa.name if isa else "none")
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    try:
        library.library()
    except library.Unavailable as reason:
        pytest.skip(str(reason))
    if selection.ALL or request.param.name in WHOLE:
        with library.using(request.param):
            yield
    else:
        monkeypatch.setattr(library, "in_use", [products(request.param)])
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
