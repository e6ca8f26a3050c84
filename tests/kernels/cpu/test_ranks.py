"""What ranks exchange through memory, each rank a thread: tests/runtime/test_ranks.py has processes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from mmap import mmap
from typing import Any

import pytest
import torch
from mtpserve_kernels.cpu.ranks import Exchange, PeerGone, exchange_bytes
from torch import Tensor

CHUNK = 1 << 18  # bytes
SHAPES = [(1, 1), (3, 7), (1, 4096), (5, 1031), (2, CHUNK // 4), (7, CHUNK // 16 + 3)]
TYPES = [torch.float32, torch.bfloat16, torch.float16]


@contextmanager
def exchanges(ranks: int, seconds: float = 60.0) -> Iterator[list[Exchange]]:
    memory = mmap(-1, exchange_bytes(ranks))
    # Whatever is read before it was written is NaN in all three types.
    head = len(memory) - 2 * ranks * CHUNK
    memory[head:] = b"\xff" * (len(memory) - head)
    yield [Exchange(memory, rank, ranks, seconds) for rank in range(ranks)]


def on_each(made: list[Exchange], work: Callable[[Exchange], Any]) -> list[Any]:
    with ThreadPoolExecutor(len(made)) as pool:
        return list(pool.map(work, made))


def parts_of(ranks: int, shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> list[Tensor]:
    made = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=made).to(dtype) for _ in range(ranks)]


def total_of(parts: list[Tensor]) -> Tensor:
    """In the order of ranks, in float32."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total.to(parts[0].dtype)


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("threads", [1, 3])
def test_sums_and_gathered_parts_are_those_of_plain_torch(ranks: int, threads: int, with_threads: Callable[..., Any]) -> None:
    cases = [(shape, dtype) for shape in SHAPES for dtype in TYPES]
    parts = [parts_of(ranks, shape, dtype, seed) for seed, (shape, dtype) in enumerate(cases)]

    def work(exchange: Exchange) -> list[tuple[Tensor, Tensor]]:
        mine = [each[exchange.rank] for each in parts]
        torch.set_num_threads(threads)  # of this thread
        return [(exchange.gather(part), exchange.sum(part.clone())) for part in mine]

    with exchanges(ranks) as made:
        for each in with_threads(threads, lambda: on_each(made, work)):
            for (gathered, summed), given in zip(each, parts, strict=True):
                assert torch.equal(gathered, torch.cat(given, dim=-1)) and torch.equal(summed, total_of(given))


def test_numbers_that_are_not_finite_stay_so() -> None:
    given = [torch.tensor([[1.0, torch.nan, torch.inf, 3.0]]), torch.tensor([[2.0, 1.0, -torch.inf, torch.inf]])]
    with exchanges(2) as made:
        for summed in on_each(made, lambda exchange: exchange.sum(given[exchange.rank].clone())):
            assert summed[0, 0] == 3 and summed[0, 1:3].isnan().all() and summed[0, 3] == torch.inf


def test_columns_of_a_wider_tensor() -> None:
    wide = parts_of(2, (6, 40), torch.float32, 0)
    with exchanges(2) as made:
        for gathered in on_each(made, lambda exchange: exchange.gather(wide[exchange.rank][:, 3:30])):
            assert torch.equal(gathered, torch.cat([each[:, 3:30] for each in wide], dim=-1))


def test_many_turns_in_a_row_with_ranks_that_are_late_now_and_then() -> None:
    turns, size = 400, 33

    def work(exchange: Exchange) -> Tensor:
        rank, made = exchange.rank, []
        for turn in range(turns):
            if (turn + 31 * rank) % 97 == 0:
                time.sleep(0.002)
            made.append(exchange.sum(torch.full((size,), float(turn * 10 + rank))))
        return torch.stack(made)

    with exchanges(3) as made:
        for each in on_each(made, work):
            assert torch.equal(each, (torch.arange(turns) * 30.0 + 3)[:, None].expand(-1, size))


def test_nobody_waits_for_a_rank_that_is_gone() -> None:
    def work(exchange: Exchange) -> None:
        if exchange.rank == 1:
            time.sleep(0.05)
            exchange.give_up()
            return
        for _ in range(2):
            with pytest.raises(PeerGone):
                exchange.sum(torch.ones(3))

    with exchanges(2) as made:
        on_each(made, work)
    with exchanges(2, seconds=0.02) as made, pytest.raises(PeerGone):
        made[0].gather(torch.ones(1, 3))
