"""Engines that share their experts, as threads of a test: `core.parallel.Peers`, which may be slow, and dies with any of them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import torch
from torch import Tensor

from mtpserve.core.errors import EngineDead


class Table:
    """Where they meet. A gather that not all reach in `patience` seconds fails for those who wait."""

    def __init__(self, size: int, patience: float = 10.0) -> None:
        self.size, self.barrier = size, threading.Barrier(size)
        self.patience, self.brought = patience, [None] * size
        self.meetings = 0

    def bring(self, rank: int, what: Any) -> list[Any]:
        self.brought[rank] = what
        self._wait()
        told = list(self.brought)
        self._wait()
        return told

    def _wait(self) -> None:
        try:
            self.barrier.wait(self.patience)
        except threading.BrokenBarrierError:
            raise EngineDead("an engine is missing") from None


class ThreadPeers:
    def __init__(self, table: Table, rank: int, random: Random | None = None) -> None:
        self.table, self.rank, self.size, self.random = table, rank, table.size, random
        self.gathered = 0

    def gather(self, numbers: Sequence[int]) -> list[list[int]]:
        self._dawdle()
        self.gathered += 1
        return list(self.table.bring(self.rank, list(numbers)))

    def swap(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        self._dawdle()
        parts = [given[self.rank] for given in self.table.bring(self.rank, rows.split(list(sent)))]
        assert [len(part) for part in parts] == list(received)
        return torch.cat(parts)

    def _dawdle(self) -> None:
        if self.random is not None and self.random.random() < 0.3:
            time.sleep(self.random.random() * 1e-4)


def together(size: int, work: Callable[[int], None]) -> None:
    """`work(rank)` in a thread each; raises the first error."""
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            work(rank)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    if errors:
        raise errors[0]
    assert not any(thread.is_alive() for thread in threads)
