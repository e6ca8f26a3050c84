"""Rows of a step from the seats, and verdicts that are committed to them: the same bits as plain torch."""

from __future__ import annotations

import pytest
import torch
from mtpserve_kernels.cache import reference as cache
from mtpserve_kernels.cpu.requests import advance, following, hold, place, slots
from mtpserve_kernels.requests import reference
from mtpserve_kernels.requests.reference import RequestTable
from torch import Tensor

from tests.kernels.cases import places
from tests.kernels.seat_tensors import LONGEST, PAGE, random_seats

SEATS = 23


@pytest.mark.parametrize(("number", "page"), [(0, 16), (1, 1), (7, 16), (300, 5), (513, 64)])
def test_slots_of_places(number: int, page: int) -> None:
    table, req_indices, index = places(number, page)
    assert torch.equal(slots(table, req_indices, index, page), cache.slots(table, req_indices, index, page))
    part = table[:, 3:30]  # rows of a wider table; and the place before a request's first
    index = (index % (27 * page)) - 1
    assert torch.equal(slots(part, req_indices, index, page), cache.slots(part, req_indices, index, page))


def copied(seats: RequestTable) -> RequestTable:
    return RequestTable(seats.tokens.clone(), seats.counts.clone(), seats.stops.clone(), seats.done.clone(), seats.block_table, PAGE)


def layout(requests: int, widest: int, seed: int) -> tuple[Tensor, ...]:
    """seat_ids, row_span, offset, query_start_loc, last_row, drafts, samples"""
    dice = torch.Generator().manual_seed(seed)
    drafts, committed = (first + torch.randint(widest + 1, (requests,), generator=dice) for first in (0, 1))
    width = committed + drafts
    query_start_loc = torch.cat([torch.zeros(1, dtype=torch.int64), width.cumsum(0)])
    row_span = torch.arange(requests).repeat_interleave(width)
    offset = torch.arange(len(row_span)) - query_start_loc[row_span]
    req_indices = torch.randperm(SEATS, generator=dice)[:requests]
    return (
        req_indices,
        row_span,
        offset,
        query_start_loc,
        query_start_loc[:-1] + committed - 1,
        drafts,
        torch.randint(2, (requests,), generator=dice),
    )


@pytest.mark.parametrize("started", [False, True])
@pytest.mark.parametrize(("requests", "widest"), [(0, 3), (1, 0), (1, 7), (5, 0), (17, 3), (23, 8)])
def test_rows(requests: int, widest: int, started: bool) -> None:
    given = random_seats(SEATS, requests)
    req_indices, row_span, offset, query_start_loc, _, drafts, samples = layout(requests, widest, requests + widest)
    start = torch.arange(requests) if started else None
    wanted = reference.place(given, req_indices, row_span, offset, query_start_loc, drafts, samples, start=start)
    made = place(given, req_indices, row_span, offset, query_start_loc, drafts, samples, start=start)
    assert len(made) == len(wanted) == 7
    for number, (ours, theirs) in enumerate(zip(made, wanted, strict=True)):
        assert torch.equal(ours, theirs), number


@pytest.mark.parametrize("rows", [0, 1, 40])
def test_the_tokens_after_rows(rows: int) -> None:
    given, dice = random_seats(SEATS, rows), torch.Generator().manual_seed(rows)
    token_req_indices, index = torch.randint(SEATS, (rows,), generator=dice), torch.randint(LONGEST - 1, (rows,), generator=dice)
    for made, wanted in zip(following(given, token_req_indices, index), reference.following(given, token_req_indices, index), strict=True):
        assert torch.equal(made, wanted)


@pytest.mark.parametrize(("requests", "depth"), [(0, 3), (1, 0), (1, 7), (5, 0), (17, 3), (23, 8)])
def test_verdicts(requests: int, depth: int) -> None:
    """Tokens that stop a request, requests that reach their limit, that have ended, that do not sample."""
    before = random_seats(SEATS, requests + 1)
    req_indices, _, _, query_start_loc, last_row, _, samples = layout(requests, depth, 3 * requests + depth)
    samples = samples.masked_fill(before.done[req_indices], 0)
    dice = torch.Generator().manual_seed(depth)
    accepted = torch.randint(depth + 1, (requests,), generator=dice)
    tokens = torch.randint(40, (requests, 2 * depth + 2), generator=dice)[:, ::2]  # not contiguous
    wanted, made = copied(before), copied(before)
    reference.advance(wanted, req_indices, query_start_loc, last_row, samples, accepted, tokens)
    advance(made, req_indices, query_start_loc, last_row, samples, accepted, tokens)
    for name in ("tokens", "counts", "done"):
        assert torch.equal(getattr(made, name), getattr(wanted, name)), name
    assert requests < 17 or not torch.equal(before.done, made.done)


@pytest.mark.parametrize(("requests", "drafts"), [(0, 3), (1, 0), (1, 7), (17, 3), (23, 8)])
def test_drafts_that_wait(requests: int, drafts: int) -> None:
    before, dice = random_seats(SEATS, requests + 2), torch.Generator().manual_seed(drafts)
    req_indices, count = torch.randperm(SEATS, generator=dice)[:requests], torch.randint(drafts + 1, (requests,), generator=dice)
    tokens = torch.randint(40, (requests, 2 * drafts), generator=dice)[:, ::2]  # not contiguous
    wanted, made = copied(before), copied(before)
    probs, kept, own = torch.rand(requests, drafts, 50), torch.zeros(SEATS, 8, 50), torch.zeros(SEATS, 8, 50)
    reference.hold(wanted, req_indices, tokens, count, (probs, kept) if drafts else None)
    hold(made, req_indices, tokens, count, (probs, own) if drafts else None)
    assert torch.equal(own, kept) and bool(kept.any()) == (requests * drafts > 0)
    assert torch.equal(made.tokens, wanted.tokens) and torch.equal(made.counts, wanted.counts)
    assert requests < 17 or not (torch.equal(made.tokens, before.tokens) or torch.equal(made.counts, before.counts))
