"""Moving a tree's path together, in place; slots of tokens; rows at the ends of pages."""

from __future__ import annotations

import pytest
import torch
from mtpserve_kernels.cache import reference
from mtpserve_kernels.cache.compact import compact
from mtpserve_kernels.cache.slots import slots, store_boundary

from tests.kernels.cases import boundary, paths, places


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize(("heads", "dim"), [(1, 576), (3, 80), (8, 256)])
def test_paths_overlap_with_where_they_go(device: torch.device, heads: int, dim: int, dtype: torch.dtype) -> None:
    pool, source, target = (x.to(device) for x in paths(heads, dim, dtype))
    wanted = pool.clone()
    reference.compact(wanted, source, target)
    compact(pool, source, target)
    assert torch.equal(pool.view(torch.uint8), wanted.view(torch.uint8))
    assert pool.float().any()


@pytest.mark.parametrize(("number", "page"), [(0, 16), (1, 1), (7, 16), (300, 5), (513, 64)])
def test_slots_of_places(device: torch.device, number: int, page: int) -> None:
    table, req_indices, index = (x.to(device) for x in places(number, page))
    wanted = reference.slots(table, req_indices, index, page)
    assert torch.equal(slots(table, req_indices, index, page), wanted)


@pytest.mark.parametrize(("width", "page"), [(32, 4), (1500, 16), (7, 1)])
def test_rows_at_the_ends_of_pages(device: torch.device, width: int, page: int) -> None:
    """Only the rows of pages' last tokens are kept; those of padding go to the last page."""
    kept, taken, hidden = (x.to(device) for x in boundary(width, page))
    wanted = kept.clone()
    reference.store_boundary(wanted, taken, hidden, page)
    store_boundary(kept, taken, hidden, page)
    assert torch.equal(kept[:-1], wanted[:-1])
    ends = (taken + 1) % page == 0
    assert ends.any() and torch.equal(kept[taken[ends] // page], hidden[ends])
