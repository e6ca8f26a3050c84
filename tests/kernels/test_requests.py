"""Rows of a step from the seats, verdicts and drafts that go there, and the table for the host: the same bits as plain torch.

What is beside the input is as absurd as what a result is handed to write to: a number too many that is read or left out is seen.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from mtpserve_kernels.requests import reference, step
from mtpserve_kernels.requests.reference import RequestTable
from torch import Tensor

from tests.kernels.seat_tensors import LONGEST, PAGE, random_seats

SEATS = 36
PADDING = SEATS - 1  # the seat of no request; it may occur several times
HUGE = 1 << 40
REQUESTS = (0, 1, 2, 5, 33)


def between_poison(numbers: Tensor, device: torch.device) -> Tensor:
    """The same in the middle of absurd numbers, and not aligned."""
    flat = torch.full((numbers.numel() + 10,), HUGE, dtype=numbers.dtype)
    flat[5:-5] = numbers.flatten()
    return flat.to(device)[5:-5].view(numbers.shape)


def seats_of(seed: int, device: torch.device) -> RequestTable:
    """With a seat that pads batches, and a page table whose rows are those of a wider one."""
    seats = random_seats(SEATS, seed)
    seats.counts[:, PADDING] = torch.tensor([1, 0, 1, 1, 0])
    seats.done[PADDING] = True
    table = torch.cat([seats.block_table, torch.full((SEATS, 3), HUGE)], 1).to(device)
    parts = (part.to(device) for part in (seats.tokens, seats.counts, seats.stops, seats.done))
    return RequestTable(*parts, table[:, :-3], PAGE)


def clone(seats: RequestTable) -> RequestTable:
    return replace(seats, tokens=seats.tokens.clone(), counts=seats.counts.clone(), done=seats.done.clone())


def ids_of(requests: int, dice: torch.Generator) -> Tensor:
    """Seats, of which the padding one is there twice where there are enough."""
    ids = torch.randperm(SEATS - 1, generator=dice)[:requests]
    ids[requests - (2 if requests > 2 else 0) :] = PADDING
    return ids


def compare(result: RequestTable, target: RequestTable) -> None:
    """But for what follows the token of the padding seat."""
    for seats in (result, target):
        seats.tokens[PADDING, 1:] = 0
    for name in ("tokens", "counts", "stops", "done", "block_table"):
        assert torch.equal(getattr(result, name), getattr(target, name)), name


def is_aligned(*parts: Tensor) -> bool:
    return all(part.is_contiguous() and part.data_ptr() % 16 == 0 for part in parts)


def spans(requests: int, widest: int, dice: torch.Generator, device: torch.device) -> tuple[Tensor, ...]:
    """row_span, offset, query_start_loc, last_row, drafts, samples"""
    drafts, committed = (first + torch.randint(widest + 1, (requests,), generator=dice) for first in (0, 1))
    width = committed + drafts
    query_start_loc = torch.cat([torch.zeros(1, dtype=torch.int64), width.cumsum(0)])
    row_span = torch.arange(requests).repeat_interleave(width)
    offset = torch.arange(len(row_span)) - query_start_loc[row_span]
    parts = row_span, offset, query_start_loc, query_start_loc[:-1] + committed - 1, drafts, torch.randint(2, (requests,), generator=dice)
    row_span, offset, query_start_loc, last_row, drafts, samples = (between_poison(part, device) for part in parts)
    return row_span, offset, query_start_loc, last_row, drafts, samples


@pytest.mark.parametrize("starts", [False, True], ids=["computed", "start"])
@pytest.mark.parametrize("widest", [0, 1, 3, 8])
@pytest.mark.parametrize("requests", REQUESTS)
def test_rows(requests: int, widest: int, starts: bool, device: torch.device) -> None:
    dice = torch.Generator().manual_seed(10 * requests + widest)
    seats, req_indices = seats_of(requests, device), between_poison(ids_of(requests, dice), device)
    row_span, offset, query_start_loc, _, drafts, samples = spans(requests, widest, dice, device)
    start = between_poison(torch.arange(requests), device) if starts else None
    target = reference.place(seats, req_indices, row_span, offset, query_start_loc, drafts, samples, start=start)
    result = step.place(seats, req_indices, row_span, offset, query_start_loc, drafts, samples, start=start)
    assert len(result) == len(target) == 7
    for number, (ours, theirs) in enumerate(zip(result, target, strict=True)):
        assert torch.equal(ours, theirs) and is_aligned(ours), number
    assert requests < 33 or widest < 8 or bool((target[5] < drafts).any()), "some have fewer drafts, or no room"


@pytest.mark.parametrize("rows", [0, 1, 2, 31, 40, 97])
def test_the_tokens_after_rows(rows: int, device: torch.device) -> None:
    seats, dice = seats_of(rows, device), torch.Generator().manual_seed(rows)
    token_req_indices, index = (between_poison(torch.randint(most, (rows,), generator=dice), device) for most in (SEATS, LONGEST - 1))
    result = step.following(seats, token_req_indices, index)
    for part, target in zip(result, reference.following(seats, token_req_indices, index), strict=True):
        assert torch.equal(part, target)
    assert is_aligned(*result)


@pytest.mark.parametrize("steps", [1, 2, 4])
@pytest.mark.parametrize("lookback", [1, 2])
@pytest.mark.parametrize("requests", REQUESTS)
def test_positions_of_drafts(requests: int, lookback: int, steps: int, device: torch.device) -> None:
    seats, dice = seats_of(requests, device), torch.Generator().manual_seed(requests)
    arguments = seats.counts[0], seats.block_table, between_poison(ids_of(requests, dice), device), lookback, steps, PAGE
    for result, target in zip(step.draft_positions(*arguments), reference.draft_positions(*arguments), strict=True):
        assert torch.equal(result, target)
        assert is_aligned(*result.unbind())


@pytest.mark.parametrize("depth", [0, 1, 3, 8])
@pytest.mark.parametrize("requests", REQUESTS)
def test_verdicts(requests: int, depth: int, device: torch.device) -> None:
    """Tokens that stop a request, requests that reach their limit, that have ended, that do not sample."""
    dice, seats = torch.Generator().manual_seed(10 * requests + depth), seats_of(requests + 1, device)
    req_indices = between_poison(ids_of(requests, dice), device)
    _, _, query_start_loc, last_row, _, samples = spans(requests, depth, dice, device)
    samples = between_poison(samples.masked_fill(seats.done[req_indices], 0), device)
    accepted = between_poison(torch.randint(depth + 1, (requests,), generator=dice), device)
    tokens = torch.randint(40, (requests, 2 * depth + 2), generator=dice).to(device)[:, ::2]  # not contiguous
    result, target = clone(seats), clone(seats)
    reference.advance(target, req_indices, query_start_loc, last_row, samples, accepted, tokens)
    step.advance(result, req_indices, query_start_loc, last_row, samples, accepted, tokens)
    assert requests < 33 or not torch.equal(seats.done, result.done)
    compare(result, target)


def test_a_stop_token_counts_where_it_is_committed(device: torch.device) -> None:
    """At each place, with each number of accepted drafts. What follows them is void, and no stop token's filling stops anything."""
    depth = 4
    accepted, place = (part.flatten() for part in torch.meshgrid(torch.arange(depth + 1), torch.arange(depth + 1), indexing="ij"))
    requests, seats = len(place), seats_of(0, device)
    seats.done.zero_()
    seats.counts[3] = LONGEST
    seats.stops.fill_(-1)
    seats.stops[:, 2] = 39
    tokens = torch.where(torch.arange(depth + 1) > accepted.unsqueeze(1), -1, 7)
    tokens[torch.arange(requests), place] = 39
    query_start_loc = torch.arange(requests + 1, device=device) * (depth + 1)
    arguments = (
        torch.arange(requests, device=device),
        query_start_loc,
        query_start_loc[:-1],
        torch.ones(requests, dtype=torch.int64, device=device),
    )
    target = clone(seats)
    step.advance(seats, *arguments, accepted.to(device), tokens.to(device))
    reference.advance(target, *arguments, accepted.to(device), tokens.to(device))
    assert torch.equal(seats.done[:requests].cpu(), place <= accepted)
    compare(seats, target)


@pytest.mark.parametrize("has_probs", [False, True])
@pytest.mark.parametrize("drafts", [0, 1, 3, 8])
@pytest.mark.parametrize("requests", REQUESTS)
def test_drafts_that_wait(requests: int, drafts: int, has_probs: bool, device: torch.device) -> None:
    dice, seats, vocab = torch.Generator().manual_seed(requests + drafts), seats_of(requests + 2, device), 1001
    req_indices = ids_of(requests, dice)
    count = between_poison(torch.randint(drafts + 1, (requests,), generator=dice).masked_fill(req_indices == PADDING, 0), device)
    req_indices = between_poison(req_indices, device)
    tokens = torch.randint(40, (2 * drafts, requests), generator=dice).to(device).t()[:, ::2]  # not contiguous
    result, target = clone(seats), clone(seats)
    probs, probs_target = torch.rand(requests, drafts, vocab, device=device), torch.full((SEATS, 9, vocab), torch.nan, device=device)
    probs_result = probs_target.clone()
    reference.hold(target, req_indices, tokens, count, (probs, probs_target) if has_probs else None)
    step.hold(result, req_indices, tokens, count, (probs, probs_result) if has_probs else None)
    assert torch.equal(probs_result[:PADDING].view(torch.int32), probs_target[:PADDING].view(torch.int32))
    assert bool(probs_result.isfinite().any()) == (has_probs and requests * drafts > 0)
    assert requests < 33 or not torch.equal(result.counts, seats.counts)
    compare(result, target)


@pytest.mark.parametrize(
    ("drafts", "depth", "tree"), [(0, 0, False), (1, 1, False), (3, 3, False), (8, 3, False), (1, 1, True), (3, 3, True), (8, 3, True)]
)
@pytest.mark.parametrize("requests", REQUESTS)
def test_the_table_for_the_host(requests: int, drafts: int, depth: int, tree: bool, device: torch.device) -> None:
    dice = torch.Generator().manual_seed(requests + drafts)

    def integers(most: int, *shape: int) -> Tensor:
        return between_poison(torch.randint(most, shape, generator=dice), device)

    rows = requests * (drafts + 2)
    req_indices, ids = integers(SEATS, requests), integers(1000, rows)
    sample_rows = integers(max(rows, 1), requests, drafts + 1)
    verdict = integers(9, requests), between_poison(torch.randint(2, (requests,), generator=dice).bool(), device)
    tokens = integers(1000, requests, 2 * depth + 2)[:, ::2]
    nodes = (integers(9, requests, drafts + 2)[:, :drafts], integers(9, requests, depth + 1)) if tree else (None, None)
    arguments = req_indices, ids, sample_rows, integers(4, SEATS, drafts + 1), integers(9, requests), *verdict, tokens, *nodes
    target = reference.result_table(*arguments)
    assert torch.equal(step.result_table(*arguments), target)
    assert target.shape[1] == 4 + depth + 2 * drafts + (drafts + depth + 1 if tree else 0)
