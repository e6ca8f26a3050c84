"""Cores and threads of the engine's process."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from mtpserve.config import CPUConfig, EngineConfig, ModelConfig, ParallelConfig
from mtpserve.core.errors import ConfigError
from mtpserve.engine.process.client import environment, wait_policy
from mtpserve.engine.startup import threads

needs_affinity = pytest.mark.skipif(threads.allowed() is None, reason="this system does not bind processes to cores")


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    cores, count = threads.allowed(), torch.get_num_threads()
    yield
    torch.set_num_threads(count)
    if cores is not None:
        os.sched_setaffinity(0, cores)


def bound(engines: int = 1, replica: int = 0, ranks: int = 1, rank: int = 0, **cpu: Any) -> EngineConfig:
    model, parallel = ModelConfig(device="cpu"), ParallelConfig(data_parallel_size=engines, tensor_parallel_size=ranks)
    return EngineConfig(model=model, parallel=parallel, cpu=CPUConfig(**cpu), replica=replica, rank=rank)


def test_a_number_of_threads() -> None:
    threads.bind(bound(cpu_threads=3))
    assert torch.get_num_threads() == 3


@needs_affinity
def test_more_threads_than_cores_are_warned_of(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    cores = 2
    monkeypatch.setattr(threads, "allowed", lambda: frozenset(range(cores)))
    monkeypatch.setattr(os, "sched_setaffinity", lambda *_: None)
    threads.bind(bound(cpu_threads=cores))
    threads.bind(bound(2, 1, cpu_threads=cores))  # the first engine says it for all
    assert not caplog.messages
    threads.bind(bound(2, 0, cpu_threads=cores))
    assert caplog.messages == [
        f"{2 * cores} threads on {cores} cores (2 engine processes with {cores} threads each) slow each other down; see --cpu-threads"
    ]


@needs_affinity
def test_cores_and_as_many_threads() -> None:
    core = min(threads.allowed() or {0})
    threads.bind(bound(cpu_affinity=str(core)))
    assert threads.allowed() == {core} and torch.get_num_threads() == 1
    threads.bind(bound(cpu_affinity=f"{core}-{core}", cpu_threads=2))
    assert torch.get_num_threads() == 2


@needs_affinity
@pytest.mark.parametrize(
    ("engines", "cores", "expected"), [(2, "0-3", [{0, 1}, {2, 3}]), (3, "1,2,5,7", [{1}, {2}, {5, 7}]), (3, "0-1", [{0, 1}] * 3)]
)
def test_engines_share_the_cores(monkeypatch: pytest.MonkeyPatch, engines: int, cores: str, expected: list[set[int]]) -> None:
    """Each has a part; all of them, where there are fewer cores than engines."""
    found: list[set[int]] = []
    monkeypatch.setattr(threads, "allowed", lambda: frozenset(range(8)))
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, chosen: found.append(set(chosen)))
    for replica in range(engines):
        threads.bind(bound(engines, replica, cpu_affinity=cores))
        assert torch.get_num_threads() == len(found[-1])
    assert found == expected
    threads.bind(bound(2, 1))
    assert found[-1] == {4, 5, 6, 7}


@needs_affinity
def test_ranks_share_the_cores_of_their_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """With equally many threads: what each of them computes is the same to the last bit."""
    found: list[tuple[int, ...]] = []
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, chosen: found.append(tuple(sorted(chosen))))
    for cores, each in ((8, 2), (7, 1), (3, 1)):
        monkeypatch.setattr(threads, "allowed", lambda cores=cores: frozenset(range(cores)))
        for replica, rank in ((0, 0), (0, 1), (1, 0), (1, 1)):
            threads.bind(bound(2, replica, 2, rank))
            assert torch.get_num_threads() == each
    assert found == [(0, 1), (2, 3), (4, 5), (6, 7), (0,), (1, 2), (3, 4), (5, 6)], "three cores are for all four"


def test_each_engine_has_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[int] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    for replica in range(2):
        threads.bind(replace(bound(2, replica), model=ModelConfig()))
    assert chosen == [0, 1]
    with pytest.raises(ConfigError, match="--data-parallel-size must be at most 2, one engine for each GPU, got 3"):
        threads.bind(replace(bound(3, 2), model=ModelConfig()))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    for rank in range(2):
        threads.bind(replace(bound(2, 1, 2, rank), model=ModelConfig()))
    assert chosen == [0, 1, 2, 3]
    with pytest.raises(ConfigError, match="--tensor-parallel-size must be at most 4, one rank for each GPU, got 8"):
        threads.bind(replace(bound(ranks=8), model=ModelConfig()))
    with pytest.raises(ConfigError, match="--data-parallel-size must be at most 2, one engine for each 2 GPUs, got 3"):
        threads.bind(replace(bound(3, 2, 2), model=ModelConfig()))


@needs_affinity
def test_a_core_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match="--cpu-affinity 0-99999: this process is not allowed to run on core "):
        threads.bind(bound(cpu_affinity="0-99999"))


def test_a_system_that_does_not_bind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "allowed", lambda: None)
    with pytest.raises(ConfigError, match="cannot bind"):
        threads.bind(bound(cpu_affinity="0"))


@pytest.mark.parametrize("text", ["", "a", "3-1", "1,,2", "-1", "1-"])
def test_what_is_no_list_of_cores(text: str) -> None:
    with pytest.raises(ConfigError, match="--cpu-affinity must be numbers of cores"):
        CPUConfig(cpu_affinity=text)


def test_lists_of_cores() -> None:
    assert CPUConfig(cpu_affinity="0-2, 5,7-7").cores == {0, 1, 2, 5, 7}


def test_how_threads_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user's own policy stays."""
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    assert wait_policy()["GOMP_SPINCOUNT"] == "100000"
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    assert wait_policy() == {}


def test_huge_pages_unless_malloc_was_tuned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    assert environment()["GLIBC_TUNABLES"] == "glibc.malloc.hugetlb=1" and environment()["PATH"] == os.environ["PATH"]
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.check=3")
    assert environment()["GLIBC_TUNABLES"] == "glibc.malloc.check=3"
