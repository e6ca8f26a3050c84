"""What a step reads from the seats of its requests, and writes to them, in plain torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mtpserve_kernels.cache import reference as cache

SlotsOf = Callable[[Tensor, Tensor, Tensor, int], Tensor]


@dataclass(eq=False, slots=True)
class Seats:
    """A request that runs has a row of each tensor. They are changed in place, and are the same ones for as long as an engine lives."""

    tokens: Tensor  # [S, W] int64: what is committed, and from `length` on the drafts that wait
    counts: Tensor  # [5, S] int64: length, computed, prompt, limit, waiting
    stops: Tensor  # [S, N] int64, -1: none
    done: Tensor  # [S] bool
    page_table: Tensor  # [S, columns] int64, of group 0
    page_size: int
    addresses: Any = None  # kept by a kernel that needs them


@dataclass(frozen=True, slots=True)
class Placed:
    """The rows of a step, T for R requests."""

    ids: Tensor  # [T]
    index: Tensor  # [T], place in the request
    slots: Tensor  # [T], in the pages of group 0
    row_seats: Tensor  # [T]
    kv_len: Tensor  # [R], tokens in the cache with these rows
    draft_count: Tensor  # [R], drafts that wait and are of use: with room for n tokens, n - 1 of them and the target's own fill it
    samples: Tensor  # [R], 0 where the request has ended


def place(
    seats: Seats, seat_ids: Tensor, row_span: Tensor, offset: Tensor, cu_q: Tensor, drafts: Tensor, samples: Tensor, *,
    start: Tensor | None = None, slots_of: SlotsOf = cache.slots,
) -> Placed:  # fmt: skip
    """Row t is at `offset[t]` after what is computed of request row_span[t], or after `start` [R]; request r has the rows cu_q[r] to
    cu_q[r + 1]. `drafts` [R]: at most; `samples` [R]."""
    length, computed, _, limit, waiting = seats.counts.index_select(1, seat_ids).unbind(0)
    done, begin = seats.done[seat_ids], computed if start is None else start
    one_row = len(row_span) == len(seat_ids)
    row_seats, index = (seat_ids, begin) if one_row else (seat_ids[row_span], begin[row_span] + offset)
    useful = torch.minimum(waiting, limit - length - 1).clamp(min=0).masked_fill(done, 0)
    return Placed(
        seats.tokens[row_seats, index],
        index,
        slots_of(seats.page_table, row_seats, index, seats.page_size),
        row_seats,
        begin + cu_q.diff(),
        torch.minimum(drafts, useful),
        samples.masked_fill(done, 0),
    )


def following(seats: Seats, row_seats: Tensor, index: Tensor, *, slots_of: SlotsOf = cache.slots) -> tuple[Tensor, Tensor, Tensor]:
    """Of the token after each `index` [T] of these requests [T]: which one it is, its place in the request and its slot in the pages of
    group 0, [T] each."""
    after = index + 1
    return seats.tokens[row_seats, after], after, slots_of(seats.page_table, row_seats, after, seats.page_size)


def draft_positions(
    length: Tensor, page_table: Tensor, seat_ids: Tensor, lookback: int, steps: int, page_size: int
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """length [S], page_table [S, columns], seat_ids [D] of requests that get `steps` drafts one after the other. → positions
    length - lookback to length + steps - 1 [lookback + steps, D], and slots of the drafts that a next step takes [steps - 1, D]."""
    positions = length[seat_ids] + torch.arange(-lookback, steps, device=length.device).unsqueeze(1)
    draft_inputs = positions[lookback:-1]
    return positions, cache.slots(page_table, seat_ids.expand_as(draft_inputs), draft_inputs, page_size)


def hold(seats: Seats, seat_ids: Tensor, tokens: Tensor, count: Tensor, drawn: tuple[Tensor, Tensor] | None = None) -> None:
    """tokens [D, K], count [D]: the first `count` of each row wait as drafts, after what is committed; what follows them is void. `drawn`:
    what they were drawn from [D, n, V] float32, and what that is kept in for each seat [S, n or more, V]."""
    if drawn is not None:
        probs, kept = drawn
        kept[:, : probs.shape[1]].index_copy_(0, seat_ids, probs)
    length = seats.counts[0, seat_ids].unsqueeze(1)
    seats.counts[4].index_copy_(0, seat_ids, count)
    seats.tokens.index_put_((seat_ids.unsqueeze(1), length + torch.arange(tokens.shape[1], device=tokens.device)), tokens)


def advance(seats: Seats, seat_ids: Tensor, cu_q: Tensor, last_row: Tensor, samples: Tensor, accepted: Tensor, tokens: Tensor) -> None:
    """Commit the first `accepted` + 1 of tokens [R, D + 1] where `samples` is 1; the rest is written after them, where nothing counts. All
    rows up to last_row [R], which is the request's last committed token, are computed now, and those of accepted drafts."""
    done = seats.done[seat_ids]
    length, computed, _, limit, _ = seats.counts.index_select(1, seat_ids).unbind(0)
    kept = accepted * samples
    count = kept + samples
    number = torch.arange(tokens.shape[1], device=tokens.device)
    seats.tokens.index_put_((seat_ids.unsqueeze(1), length.unsqueeze(1) + number), tokens)
    length = length + count
    rows = last_row - cu_q[:-1] + 1
    computed = computed + (rows + kept).masked_fill_(done, 0)
    seats.counts[:2].index_copy_(1, seat_ids, torch.stack((length, computed)))
    stops = (tokens.unsqueeze(2) == seats.stops[seat_ids].unsqueeze(1)).any(2) & (number < count.unsqueeze(1))
    seats.done.index_copy_(0, seat_ids, stops.any(1) | done | (length >= limit))


def result_table(
    seat_ids: Tensor, ids: Tensor, sample_rows: Tensor, draft_sources: Tensor, draft_count: Tensor, accepted: Tensor, failed: Tensor,
    tokens: Tensor, parents: Tensor | None = None, path: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """What the host wants to know of R verdicts: accepted, failed, draft_count [R], tokens [R, D + 1]; the K drafts, which are the `ids`
    [T] of sample_rows [R, K + 1] after the first, and their sources by seat [S, K or more]; of trees parents [R, K] and path [R, D + 1].
    → [R, columns] int64, side by side."""
    first = torch.stack([accepted, failed.long(), draft_count], 1)
    parts = [first, tokens, ids[sample_rows[:, 1:]], draft_sources[seat_ids, : sample_rows.shape[1] - 1]]
    return torch.cat(parts if parents is None or path is None else [*parts, parents, path], 1)
