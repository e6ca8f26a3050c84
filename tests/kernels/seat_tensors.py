"""Seats of random requests, for the tests of the kernels that read and write them."""

from __future__ import annotations

import torch
from mtpserve_kernels.requests.reference import RequestTable
from torch import Tensor

LONGEST, PAGE = 96, 4  # tokens of a seat, and of a page


def random_seats(number: int, seed: int) -> RequestTable:
    """Requests at any place, some of which have ended, have room for a few tokens only, or have more drafts than room."""
    dice = torch.Generator().manual_seed(seed)

    def integers(most: int, *shape: int) -> Tensor:
        return torch.randint(most, shape, generator=dice)

    computed = integers(60, number)
    length = computed + 1 + integers(2, number)
    limit = torch.minimum(length + integers(12, number), torch.tensor(LONGEST - 16))
    counts = torch.stack([length, computed, integers(30, number), limit, integers(9, number)])
    stops = torch.where(integers(3, number, 5) > 0, -1, integers(40, number, 5))
    table = torch.randperm(number * LONGEST // PAGE, generator=dice).view(number, -1)
    return RequestTable(integers(40, number, LONGEST), counts, stops, integers(5, number) == 0, table, PAGE)
