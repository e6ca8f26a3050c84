"""Several ranks of a model in one process: a thread for each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import Barrier, BrokenBarrierError, Thread
from typing import Protocol, TypeVar

import torch
from mtpserve_kernels.cpu.ranks import PeerGone
from torch import Tensor

from mtpserve.core.protocols.parallel import Ranks

T = TypeVar("T")
R = TypeVar("R", bound="Peer")
LONGEST = 60  # seconds that one waits for the others


class Peer(Ranks, Protocol):
    def give_up(self) -> None:
        """The others do not wait any more."""
        ...


class ThreadRank:
    """core.protocols.parallel.Ranks"""

    def __init__(self, rank: int, size: int, barrier: Barrier, given: list[Tensor]) -> None:
        self.rank, self.size, self.barrier, self.given = rank, size, barrier, given

    def sum(self, x: Tensor) -> Tensor:
        return self.together(x, lambda parts: torch.stack(parts).sum(0))

    def gather(self, x: Tensor) -> Tensor:
        return self.together(x, lambda parts: torch.cat(parts, -1))

    def give_up(self) -> None:
        self.barrier.abort()

    def together(self, x: Tensor, join: Callable[[list[Tensor]], Tensor]) -> Tensor:
        self.given[self.rank] = x
        self.barrier.wait(LONGEST)
        joined = join(self.given)
        self.barrier.wait(LONGEST)  # nobody gives the next one before all have read this one
        return joined


def thread_ranks(size: int) -> list[ThreadRank]:
    barrier, given = Barrier(size), [torch.empty(0)] * size
    return [ThreadRank(rank, size, barrier, given) for rank in range(size)]


def on_ranks(ranks: Sequence[R], work: Callable[[R], T]) -> list[T]:
    """What `work` gives on each rank. Raises the first error."""
    found: dict[int, T] = {}
    errors: list[Exception] = []

    def run(rank: R) -> None:
        try:
            found[rank.rank] = work(rank)
        except Exception as error:
            errors.append(error)
            for other in ranks:
                other.give_up()

    threads = [Thread(target=run, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in sorted(errors, key=lambda error: isinstance(error, BrokenBarrierError | PeerGone)):
        raise error
    return [found[rank.rank] for rank in ranks]
