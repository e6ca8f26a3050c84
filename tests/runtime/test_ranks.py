"""What processes sum and gather together, by each of the ways that a CPU has: the same bits on all of them."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
from mtpserve_kernels.cpu.library import Unavailable, library
from mtpserve_kernels.cpu.ranks import Exchange, PeerGone
from torch import Tensor

from mtpserve.core.protocols.parallel import Ranks
from mtpserve.runtime.parallel.ranks import TorchRanks, meeting_place, shared
from tests import selection

SHAPES = [(1, 1), (3, 7), (5, 1031), (2, 1 << 16)]
TYPES = [torch.float32, torch.bfloat16, torch.float16]
TURNS = 50 if selection.ALL else 12  # each shape with each type
CPU = torch.device("cpu")


def connected(kind: str, rank: int, size: int, file: int, ports: Connection) -> Ranks:
    if kind == "shared":
        return shared(file, rank, size)
    if rank == 0:
        store = meeting_place(size)
        for _ in range(size - 1):
            ports.send(store.port)
        return TorchRanks(rank, size, CPU, store.port, store)
    return TorchRanks(rank, size, CPU, ports.recv())


def given(rank: int, turn: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1000 * turn + rank)).to(dtype)


def exchange(ranks: Ranks) -> None:
    """Everything that is asserted of one rank."""
    for turn in range(TURNS):
        shape, dtype = SHAPES[turn % len(SHAPES)], TYPES[turn % len(TYPES)]
        parts = [given(rank, turn, shape, dtype) for rank in range(ranks.size)]
        total = parts[0].float()
        for part in parts[1:]:
            total = total + part.float()
        summed, gathered = ranks.sum(parts[ranks.rank].clone()), ranks.gather(parts[ranks.rank])
        assert torch.equal(summed, total.to(dtype)) and torch.equal(gathered, torch.cat(parts, dim=-1)), turn


def wait_for_the_dead(ranks: Ranks) -> None:
    if ranks.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if isinstance(ranks, Exchange):
        ranks.give_up()  # as the engine does, which sees the process end
    with pytest.raises(PeerGone):
        ranks.sum(torch.ones(3))


def process(kind: str, rank: int, size: int, file: int, ports: Connection, work: Callable[[Ranks], None]) -> None:
    torch.set_num_threads(1)
    work(connected(kind, rank, size, file, ports))


def codes(kind: str, size: int, work: Callable[[Ranks], None]) -> list[Any]:
    """Of processes that do it, one of them for each rank."""
    forked, file = multiprocessing.get_context("fork"), os.memfd_create("test")
    here, there = forked.Pipe()
    made = [forked.Process(target=process, args=(kind, rank, size, file, here if rank == 0 else there, work)) for rank in range(size)]
    for each in made:
        each.start()
    for each in made:
        each.join(300)
        each.kill()
    os.close(file)
    return [each.exitcode for each in made]


@pytest.fixture(params=["shared", "gloo"])
def kind(request: pytest.FixtureRequest) -> str:
    try:
        library()
    except Unavailable as reason:
        if request.param == "shared":
            pytest.skip(str(reason))
    return str(request.param)


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_have_the_same_bits(kind: str, size: int) -> None:
    assert codes(kind, size, exchange) == [0] * size


def test_a_rank_that_is_killed_holds_up_nobody(kind: str) -> None:
    assert codes(kind, 2, wait_for_the_dead) == [0, -signal.SIGKILL]
