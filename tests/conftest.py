"""For every test: few threads, since several processes share the machine; no look at the network; kernels interpreted without a GPU.

pytest --all        all tests, as `make test-all` runs them: see tests/selection.py
"""

from __future__ import annotations

import gc
import logging
import os
import sys
from collections.abc import Iterator

os.environ.setdefault("OMP_NUM_THREADS", "1")  # there is a process for each core: two threads of each would wait for each other
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
if "--all" in sys.argv:
    os.environ["MTPSERVE_TEST_ALL"] = "1"  # before tests/selection.py is imported; processes that a test starts inherit it

import pytest
import torch

if not torch.cuda.is_available():
    # Before triton is imported, which transformers does too: its own functions are interpreted, or never.
    os.environ["TRITON_INTERPRET"] = "1"

from tests import selection

gc.disable()  # until all tests are collected


@pytest.fixture(autouse=True)
def log_levels() -> Iterator[None]:
    """A test that starts a server in this process leaves the log as it was: others count lines."""
    root = logging.getLogger()
    level, handlers = root.level, root.handlers[:]
    yield
    root.setLevel(level)
    for handler in root.handlers[:]:
        if handler not in handlers and type(handler) is logging.StreamHandler:
            root.removeHandler(handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="run all tests, not the selection of tests/selection.py")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--all") and not selection.ALL:  # PYTEST_ADDOPTS, for example
        raise pytest.UsageError("--all must stand on the command line; MTPSERVE_TEST_ALL=1 does the same")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if selection.ALL or any("[" in argument for argument in config.args):  # a case that is named runs
        return
    chosen = selection.selected(items)
    kept = set(map(id, chosen))
    config.hook.pytest_deselected(items=[item for item in items if id(item) not in kept])
    items[:] = chosen


def pytest_collection_finish() -> None:
    """Modules and tests live to the end: no collection looks at them again, each of which took half a second."""
    gc.collect()
    gc.freeze()
    gc.enable()
