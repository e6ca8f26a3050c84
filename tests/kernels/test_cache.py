"""Moving a tree's path together, in place; slots of tokens; rows at the ends of pages."""

from __future__ import annotations

import pytest
import torch
from mtpserve_kernels.cache import reference
from mtpserve_kernels.cache.compact import compact
from mtpserve_kernels.cache.slots import slots, store_boundary


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize(("heads", "dim"), [(1, 576), (3, 80), (8, 256)])
def test_paths_overlap_with_where_they_go(device: torch.device, heads: int, dim: int, dtype: torch.dtype) -> None:
    dice = torch.Generator().manual_seed(dim)
    pool = torch.randn(3, 40, heads, dim, generator=dice).to(device, dtype)
    # Slots of four requests, ten each; a path is an increasing choice of nodes, its end repeated, or nothing.
    base = torch.randperm(40, generator=dice).view(4, 10)
    paths = torch.tensor([[1, 2, 3, 4], [2, 3, 5, 9], [3, 3, 3, 3], [1, 4, 4, 4]])
    source, target = base.gather(1, paths), base[:, 1:5].clone()
    repeated = torch.tensor([[False] * 4, [False] * 4, [False, True, True, True], [False, False, True, True]])
    source[repeated] = target[repeated] = -1
    wanted = pool.clone()
    reference.compact(wanted, source.to(device), target.to(device))
    compact(pool, source.contiguous().to(device), target.contiguous().to(device))
    assert torch.equal(pool.view(torch.uint8), wanted.view(torch.uint8))
    assert not torch.equal(pool.float(), torch.zeros(()))


@pytest.mark.parametrize(("number", "page"), [(0, 16), (1, 1), (7, 16), (300, 5), (513, 64)])
def test_slots_of_places(device: torch.device, number: int, page: int) -> None:
    dice = torch.Generator().manual_seed(number)
    table = torch.randint(1 << 40, (6, 40), generator=dice).to(device)
    seats, index = (torch.randint(most, (number,), generator=dice).to(device) for most in (6, 40 * page))
    wanted = reference.slots(table, seats, index, page)
    assert torch.equal(slots(table, seats, index, page), wanted)


@pytest.mark.parametrize(("width", "page"), [(32, 4), (1500, 16), (7, 1)])
def test_rows_at_the_ends_of_pages(device: torch.device, width: int, page: int) -> None:
    """Only the rows of pages' last tokens are kept; those of padding go to the last page."""
    dice = torch.Generator().manual_seed(width)
    kept = torch.randn(9, width, generator=dice).to(device)
    places = torch.randperm(8 * page, generator=dice)[: 5 * page].to(device)
    hidden = torch.randn(len(places), width, generator=dice).to(device)
    wanted = kept.clone()
    reference.store_boundary(wanted, places, hidden, page)
    store_boundary(kept, places, hidden, page)
    assert torch.equal(kept[:-1], wanted[:-1])
    ends = (places + 1) % page == 0
    assert ends.any() and torch.equal(kept[places[ends] // page], hidden[ends])
