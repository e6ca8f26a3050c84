"""Moving slots in place, rows at the ends of pages: the same bits as plain torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from mtpserve_kernels.cache import reference
from mtpserve_kernels.cpu.cache import compact, keep, store_boundary
from torch import Tensor

from tests.kernels.cases import boundary, paths

WithThreads = Callable[[int, Callable[[], Any]], Any]


def moved(pool: Tensor, source: Tensor, target: Tensor) -> Tensor:
    compact(pool, source, target)
    return pool.view(torch.uint8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize(("heads", "dim"), [(1, 576), (3, 80), (8, 256)])
def test_paths_overlap_with_where_they_go(heads: int, dim: int, dtype: torch.dtype, with_threads: WithThreads) -> None:
    pool, source, target = paths(heads, dim, dtype)
    wanted = pool.clone()
    reference.compact(wanted, source, target)
    for threads in (1, 2):
        assert torch.equal(with_threads(threads, lambda: moved(pool.clone(), source, target)), wanted.view(torch.uint8))
    assert not torch.equal(pool.view(torch.uint8), wanted.view(torch.uint8))


def test_targets_are_any_sources() -> None:
    """Rotations, which no order of copies in place gives; in a part of wider slots, as keys and values of one store are kept."""
    wide = torch.randn(2, 12, 3, 10)
    pool = wide[:, :, :2, :].as_strided((2, 12, 2, 10), (360, 30, 10, 1))
    source, target = torch.tensor([[1, 2, 3, 0], [11, 10, 9, -1]]), torch.tensor([[0, 1, 2, 3], [10, 11, 9, -1]])
    wanted = wide.clone()
    reference.compact(wanted[:, :, :2], source, target)
    compact(pool, source, target)
    assert torch.equal(wide, wanted)
    assert not torch.equal(wide[:, :4, 2], wide[:, 1:5, 2])


@pytest.mark.parametrize("requests", [0, 1])
def test_nothing_moves(requests: int) -> None:
    pool = torch.randn(2, 5, 1, 8)
    before = pool.clone()
    compact(pool, torch.full((requests, 3), -1), torch.full((requests, 3), -1))
    compact(pool, torch.zeros(requests, 0, dtype=torch.int64), torch.zeros(requests, 0, dtype=torch.int64))
    assert torch.equal(pool, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("number", "width", "room"), [(0, 8, 4), (1, 512, 32), (5, 33, 1), (300, 1500, 7)])
def test_the_last_rows_of_each_seat(number: int, width: int, room: int, dtype: torch.dtype, with_threads: WithThreads) -> None:
    dice = torch.Generator().manual_seed(number)
    rows, hidden = torch.randn(320 * room, width, generator=dice).to(dtype), torch.randn(number, width, generator=dice).to(dtype)
    req_indices, index = torch.randperm(320, generator=dice)[:number], torch.randint(5000, (number,), generator=dice)
    wanted = rows.clone()
    reference.keep(wanted, room, req_indices, index, hidden)
    for threads in (1, 2):
        made = rows.clone()
        with_threads(threads, lambda made=made: keep(made, room, req_indices, index, hidden))
        assert torch.equal(made, wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("width", "page"), [(32, 4), (1500, 16), (7, 1), (20000, 2)])
def test_rows_at_the_ends_of_pages(width: int, page: int, dtype: torch.dtype, with_threads: WithThreads) -> None:
    kept, taken, hidden = boundary(width, page)
    kept, hidden = kept.to(dtype), hidden.to(dtype)
    wanted = kept.clone()
    reference.store_boundary(wanted, taken, hidden, page)
    # Padding's rows are all of the last page.
    taken = torch.cat([taken, torch.full((3,), 9 * page - 1)])
    hidden = torch.cat([hidden, hidden[:3]])
    before = kept[-1].clone()
    for threads in (1, 2):
        got = kept.clone()
        with_threads(threads, lambda got=got: store_boundary(got, taken, hidden, page))
        assert torch.equal(got[:-1], wanted[:-1]) and torch.equal(got[-1], before)
    assert not torch.equal(kept, wanted)
