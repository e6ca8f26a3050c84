"""Several ranks of a model in one process: a thread for each."""

from __future__ import annotations

from collections.abc import Callable
from threading import Barrier, BrokenBarrierError, Thread
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
LONGEST = 60  # seconds that one waits for the others


class ThreadRank:
    """core.parallel.Ranks"""

    def __init__(self, rank: int, size: int, barrier: Barrier, given: list[Tensor]) -> None:
        self.rank, self.size, self.barrier, self.given = rank, size, barrier, given

    def sum(self, x: Tensor) -> Tensor:
        return self.together(x, lambda parts: torch.stack(parts).sum(0))

    def gather(self, x: Tensor) -> Tensor:
        return self.together(x, lambda parts: torch.cat(parts, -1))

    def together(self, x: Tensor, join: Callable[[list[Tensor]], Tensor]) -> Tensor:
        self.given[self.rank] = x
        self.barrier.wait(LONGEST)
        joined = join(self.given)
        self.barrier.wait(LONGEST)  # nobody gives the next one before all have read this one
        return joined


def on_ranks(size: int, work: Callable[[ThreadRank], T]) -> list[T]:
    """What `work` gives on each rank. Raises the first error."""
    barrier, given = Barrier(size), [torch.empty(0)] * size
    found: dict[int, T] = {}
    errors: list[Exception] = []

    def run(rank: ThreadRank) -> None:
        try:
            found[rank.rank] = work(rank)
        except Exception as error:
            errors.append(error)
            barrier.abort()

    threads = [Thread(target=run, args=(ThreadRank(rank, size, barrier, given),)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in sorted(errors, key=lambda error: isinstance(error, BrokenBarrierError)):
        raise error
    return [found[rank] for rank in range(size)]
