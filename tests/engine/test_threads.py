"""Cores and threads of the engine's process."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from mtpserve.config import CPUConfig
from mtpserve.core.errors import ConfigError
from mtpserve.engine import threads
from mtpserve.engine.client import waiting

needs_affinity = pytest.mark.skipif(threads.allowed() is None, reason="this system does not bind processes to cores")


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    cores, count = threads.allowed(), torch.get_num_threads()
    yield
    torch.set_num_threads(count)
    if cores is not None:
        os.sched_setaffinity(0, cores)


def test_a_number_of_threads() -> None:
    threads.bind(CPUConfig(cpu_threads=3))
    assert torch.get_num_threads() == 3


@needs_affinity
def test_cores_and_as_many_threads() -> None:
    core = min(threads.allowed() or {0})
    threads.bind(CPUConfig(cpu_affinity=str(core)))
    assert threads.allowed() == {core} and torch.get_num_threads() == 1
    threads.bind(CPUConfig(cpu_affinity=f"{core}-{core}", cpu_threads=2))
    assert torch.get_num_threads() == 2


@needs_affinity
def test_a_core_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match="--cpu-affinity 0-99999: this process may not run on core "):
        threads.bind(CPUConfig(cpu_affinity="0-99999"))


def test_a_system_that_does_not_bind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "allowed", lambda: None)
    with pytest.raises(ConfigError, match="does not bind"):
        threads.bind(CPUConfig(cpu_affinity="0"))


@pytest.mark.parametrize("text", ["", "a", "3-1", "1,,2", "-1", "1-"])
def test_what_is_no_list_of_cores(text: str) -> None:
    with pytest.raises(ConfigError, match="--cpu-affinity must be numbers of cores"):
        CPUConfig(cpu_affinity=text)


def test_lists_of_cores() -> None:
    assert CPUConfig(cpu_affinity="0-2, 5,7-7").cores == {0, 1, 2, 5, 7}


def test_how_threads_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user's own policy stays."""
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    assert waiting()["GOMP_SPINCOUNT"] == "100000"
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    assert waiting() == {}
