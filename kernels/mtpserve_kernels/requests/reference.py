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
class RequestTable:
    """A request that runs has a row of each tensor. They are changed in place, and are the same ones for as long as an engine lives."""

    tokens: Tensor  # [S, W] int64: what is committed, and from `length` on the drafts that wait
    counts: Tensor  # [5, S] int64: length, computed, prompt, limit, waiting
    stops: Tensor  # [S, N] int64, -1: none
    done: Tensor  # [S] bool
    block_table: Tensor  # [S, columns] int64, of group 0
    page_size: int
    addresses: Any = None  # kept by a kernel that needs them


# Of T rows of R requests: input_ids, token_indices (place in the request), slot_mapping (in the pages of group 0) and
# token_req_indices [T]; seq_lens (tokens in the cache with these rows), num_draft_tokens and samples [R].
PlacedRows = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def place(
    table: RequestTable, req_indices: Tensor, row_span: Tensor, offset: Tensor, query_start_loc: Tensor, drafts: Tensor, samples: Tensor, *,
    start: Tensor | None = None, slots_of: SlotsOf = cache.slots,
) -> PlacedRows:  # fmt: skip
    """→ PlacedRows. Row t is at `offset[t]` after what is computed of request row_span[t], or after `start` [R].
    Request r has the rows from query_start_loc[r] to query_start_loc[r + 1]. `drafts` [R]: at most; `samples` [R]."""
    length, computed, _, limit, waiting = table.counts.index_select(1, req_indices).unbind(0)
    done, begin = table.done[req_indices], computed if start is None else start
    one_row = len(row_span) == len(req_indices)
    token_req_indices, index = (req_indices, begin) if one_row else (req_indices[row_span], begin[row_span] + offset)
    useful = torch.minimum(waiting, limit - length - 1).clamp(min=0).masked_fill(done, 0)
    # With room for n tokens, n - 1 drafts and the target's own token fill it. 0 samples: the request has ended.
    return (
        table.tokens[token_req_indices, index],
        index,
        slots_of(table.block_table, token_req_indices, index, table.page_size),
        token_req_indices,
        begin + query_start_loc.diff(),
        torch.minimum(drafts, useful),
        samples.masked_fill(done, 0),
    )


def following(
    table: RequestTable, token_req_indices: Tensor, index: Tensor, *, slots_of: SlotsOf = cache.slots
) -> tuple[Tensor, Tensor, Tensor]:
    """Of the token after each `index` [T] of these requests [T]: which one it is, its place in the request and its slot in the
    pages of group 0, [T] each."""
    after = index + 1
    return table.tokens[token_req_indices, after], after, slots_of(table.block_table, token_req_indices, after, table.page_size)


def draft_positions(
    length: Tensor, block_table: Tensor, req_indices: Tensor, lookback: int, steps: int, page_size: int
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """length [S], block_table [S, columns], req_indices [D] of requests that get `steps` drafts one after the other. → positions
    length - lookback to length + steps - 1 [lookback + steps, D], and slots of the drafts that a next step takes [steps - 1, D]."""
    positions = length[req_indices] + torch.arange(-lookback, steps, device=length.device).unsqueeze(1)
    draft_inputs = positions[lookback:-1]
    return positions, cache.slots(block_table, req_indices.expand_as(draft_inputs), draft_inputs, page_size)


def hold(table: RequestTable, req_indices: Tensor, tokens: Tensor, count: Tensor, drawn: tuple[Tensor, Tensor] | None = None) -> None:
    """tokens [D, K], count [D]: the first `count` of each row wait as drafts, after what is committed; what follows them is void. `drawn`:
    what they were drawn from [D, n, V] float32, and what that is kept in for each seat [S, n or more, V]."""
    if drawn is not None:
        probs, kept = drawn
        kept[:, : probs.shape[1]].index_copy_(0, req_indices, probs)
    length = table.counts[0, req_indices].unsqueeze(1)
    table.counts[4].index_copy_(0, req_indices, count)
    table.tokens.index_put_((req_indices.unsqueeze(1), length + torch.arange(tokens.shape[1], device=tokens.device)), tokens)


def advance(
    table: RequestTable, req_indices: Tensor, query_start_loc: Tensor, last_row: Tensor, samples: Tensor, accepted: Tensor, tokens: Tensor
) -> None:
    """Commit the first `accepted` + 1 of tokens [R, D + 1] where `samples` is 1; the rest is written after them, where nothing counts. All
    rows up to last_row [R], which is the request's last committed token, are computed now, and those of accepted drafts."""
    done = table.done[req_indices]
    length, computed, _, limit, _ = table.counts.index_select(1, req_indices).unbind(0)
    kept = accepted * samples
    count = kept + samples
    number = torch.arange(tokens.shape[1], device=tokens.device)
    table.tokens.index_put_((req_indices.unsqueeze(1), length.unsqueeze(1) + number), tokens)
    length = length + count
    rows = last_row - query_start_loc[:-1] + 1
    computed = computed + (rows + kept).masked_fill_(done, 0)
    table.counts[:2].index_copy_(1, req_indices, torch.stack((length, computed)))
    stops = (tokens.unsqueeze(2) == table.stops[req_indices].unsqueeze(1)).any(2) & (number < count.unsqueeze(1))
    table.done.index_copy_(0, req_indices, stops.any(1) | done | (length >= limit))


def result_table(
    req_indices: Tensor, ids: Tensor, sample_rows: Tensor, draft_sources: Tensor, num_draft_tokens: Tensor, accepted: Tensor,
    failed: Tensor,
    tokens: Tensor, parents: Tensor | None = None, path: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """What the host wants to know of R verdicts: accepted, failed, draft_count [R], tokens [R, D + 1]; the K drafts, which are the
    `ids` [T] of sample_rows [R, K + 1] after the first, and their sources by seat [S, K or more]; of trees parents [R, K] and path
    [R, D + 1]. → [R, columns] int64, side by side."""
    first = torch.stack([accepted, failed.long(), num_draft_tokens], 1)
    parts = [first, tokens, ids[sample_rows[:, 1:]], draft_sources[req_indices, : sample_rows.shape[1] - 1]]
    return torch.cat(parts if parents is None or path is None else [*parts, parents, path], 1)
