"""What a step reads from the seats of its requests, and writes to them, for a GPU: the same bits as `reference`, each in one launch.

`table.counts` has the rows length, computed, prompt, limit, waiting. Every index is 0 or more. A seat that occurs twice in a step pads
it: it is done and does not sample. Its programs write what is there already, and tokens after its length, where nothing counts.

Rows of a result start at multiples of 16 bytes: Triton compiles the kernels that read them anew for pointers with less.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mtpserve_kernels.requests.reference import PlacedRows, RequestTable

B = 32  # rows of a program: each waits for a few dependent loads, so that many small programs take as long as one
ALIGNED = 2  # numbers, 16 bytes
NUMBERS = 4096  # of a distribution, in a program


@triton.jit
def _slot(p_table, req_idx, index, stride_table, m, PAGE: tl.constexpr):
    return tl.load(p_table + req_idx * stride_table + index // PAGE, mask=m, other=0) * PAGE + index % PAGE


@triton.jit
def _begin(p_counts, p_start, req_idx, request, stride_counts, m):
    if p_start is not None:
        begin = tl.load(p_start + request, mask=m, other=0)
    else:
        begin = tl.load(p_counts + stride_counts + req_idx, mask=m, other=0)
    return begin


@triton.jit(
    do_not_specialize=["p_req_indices", "p_span", "p_offset", "p_query_start_loc", "p_drafts", "p_samples", "p_start", "rows", "requests"]
)
def place_kernel(
    p_out, p_tokens, p_counts, p_done, p_table, p_req_indices, p_span, p_offset, p_query_start_loc, p_drafts, p_samples, p_start, rows,
    requests,
    stride_counts, stride_tokens, stride_table, PAGE: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """p_out: four results of `rows` and three of `requests`, each with room for an even number."""
    o = tl.program_id(0) * B + tl.arange(0, B)
    m_row, m = o < rows, o < requests
    span, offset = tl.load(p_span + o, mask=m_row, other=0), tl.load(p_offset + o, mask=m_row, other=0)
    row_seat, req_idx = tl.load(p_req_indices + span, mask=m_row, other=0), tl.load(p_req_indices + o, mask=m, other=0)
    index = _begin(p_counts, p_start, row_seat, span, stride_counts, m_row) + offset
    begin = _begin(p_counts, p_start, req_idx, o, stride_counts, m)
    length, limit = tl.load(p_counts + req_idx, mask=m, other=0), tl.load(p_counts + 3 * stride_counts + req_idx, mask=m, other=0)
    waiting, live = tl.load(p_counts + 4 * stride_counts + req_idx, mask=m, other=0), tl.load(p_done + req_idx, mask=m, other=1) == 0
    drafts, samples = tl.load(p_drafts + o, mask=m, other=0), tl.load(p_samples + o, mask=m, other=0)
    width = tl.load(p_query_start_loc + o + 1, mask=m, other=0) - tl.load(p_query_start_loc + o, mask=m, other=0)
    token = tl.load(p_tokens + row_seat * stride_tokens + index, mask=m_row, other=0)
    slot = _slot(p_table, row_seat, index, stride_table, m_row, PAGE)
    room = tl.maximum(tl.minimum(waiting, limit - length - 1), 0)

    stride_rows, stride_requests = rows + rows % 2, requests + requests % 2
    p_requests = p_out + 4 * stride_rows
    tl.store(p_out + o, token, mask=m_row)
    tl.store(p_out + stride_rows + o, index, mask=m_row)
    tl.store(p_out + 2 * stride_rows + o, slot, mask=m_row)
    tl.store(p_out + 3 * stride_rows + o, row_seat, mask=m_row)
    tl.store(p_requests + o, begin + width, mask=m)
    tl.store(p_requests + stride_requests + o, tl.minimum(drafts, tl.where(live, room, 0)), mask=m)
    tl.store(p_requests + 2 * stride_requests + o, tl.where(live, samples, 0), mask=m)


@triton.jit(do_not_specialize=["p_req_indices", "p_index", "rows"])
def following_kernel(
    p_out, p_tokens, p_table, p_req_indices, p_index, rows, stride_tokens, stride_table, PAGE: tl.constexpr, B: tl.constexpr
):
    """p_out: three results of `rows`, each with room for an even number."""
    o = tl.program_id(0) * B + tl.arange(0, B)
    m = o < rows
    req_idx, index = tl.load(p_req_indices + o, mask=m, other=0), tl.load(p_index + o, mask=m, other=0) + 1
    token = tl.load(p_tokens + req_idx * stride_tokens + index, mask=m, other=0)
    slot = _slot(p_table, req_idx, index, stride_table, m, PAGE)
    stride_rows = rows + rows % 2
    tl.store(p_out + o, token, mask=m)
    tl.store(p_out + stride_rows + o, index, mask=m)
    tl.store(p_out + 2 * stride_rows + o, slot, mask=m)


@triton.jit(do_not_specialize=["p_req_indices", "requests", "lookback", "steps"])
def draft_positions_kernel(
    p_out, p_length, p_table, p_req_indices, requests, lookback, steps, stride_table, PAGE: tl.constexpr, B: tl.constexpr
):
    """Program (i, …): the positions length - lookback + i, and their slots if rows of drafts go there."""
    i, o = tl.program_id(0), tl.program_id(1) * B + tl.arange(0, B)
    m = o < requests
    req_idx = tl.load(p_req_indices + o, mask=m, other=0)
    position = tl.load(p_length + req_idx, mask=m, other=0) - lookback + i
    stride_rows = requests + requests % 2
    tl.store(p_out + i * stride_rows + o, position, mask=m)
    if (i >= lookback) & (i < lookback + steps - 1):
        tl.store(p_out + (steps + i) * stride_rows + o, _slot(p_table, req_idx, position, stride_table, m, PAGE), mask=m)


@triton.jit(do_not_specialize=["p_req_indices", "p_draft", "p_count", "stride_draft", "next_draft"])
def hold_kernel(
    p_tokens, p_counts, p_req_indices, p_draft, p_count, p_probs, p_draft_probs, stride_counts, stride_tokens, stride_draft, next_draft,
    stride_probs, numbers, DRAFTS: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """p_draft_probs [seats, stride_probs] becomes p_probs [requests, numbers] where p_probs is not None: B numbers in a program (…, i)."""
    r, i = tl.program_id(0).to(tl.int64), tl.program_id(1)
    req_idx = tl.load(p_req_indices + r)
    if i == 0:
        count = tl.load(p_count + r)
        if DRAFTS > 0:
            o = tl.arange(0, triton.next_power_of_2(DRAFTS))
            b_draft, length = tl.load(p_draft + r * stride_draft + o * next_draft, mask=o < DRAFTS, other=0), tl.load(p_counts + req_idx)
            tl.store(p_tokens + req_idx * stride_tokens + length + o, b_draft, mask=o < DRAFTS)
        tl.store(p_counts + 4 * stride_counts + req_idx, count)
    if p_probs is not None:
        o = i * B + tl.arange(0, B)
        tl.store(
            p_draft_probs + req_idx * stride_probs + o, tl.load(p_probs + r * numbers + o, mask=o < numbers, other=0.0), mask=o < numbers
        )


@triton.jit(do_not_specialize=["p_req_indices", "p_query_start_loc", "p_last", "p_samples", "p_accepted", "p_verdict"])
def advance_kernel(
    p_tokens, p_counts, p_stops, p_done, p_req_indices, p_query_start_loc, p_last, p_samples, p_accepted, p_verdict, stride_counts,
    stride_tokens,
    WIDTH: tl.constexpr, STOPS: tl.constexpr,
):  # fmt: skip
    """p_verdict [requests, WIDTH], p_stops [seats, STOPS]. The program's own writes come after all of its reads."""
    r = tl.program_id(0).to(tl.int64)
    req_idx, samples = tl.load(p_req_indices + r), tl.load(p_samples + r)
    length, computed = tl.load(p_counts + req_idx), tl.load(p_counts + stride_counts + req_idx)
    limit, done = tl.load(p_counts + 3 * stride_counts + req_idx), tl.load(p_done + req_idx) != 0
    accepted = tl.load(p_accepted + r) * samples
    rows = tl.load(p_last + r) - tl.load(p_query_start_loc + r) + 1
    o, o_stop = tl.arange(0, triton.next_power_of_2(WIDTH)), tl.arange(0, triton.next_power_of_2(STOPS))
    m = o < WIDTH
    b_token = tl.load(p_verdict + r * WIDTH + o, mask=m, other=0)
    b_stop = tl.load(p_stops + req_idx * STOPS + o_stop, mask=o_stop < STOPS, other=0)
    b_stops = (b_token[:, None] == b_stop[None, :]) & (o < accepted + samples)[:, None] & (o_stop < STOPS)[None, :]
    has_stop = tl.max(tl.max(b_stops.to(tl.int32), 1), 0) > 0
    end = length + accepted + samples
    tl.debug_barrier()  # another thread of the program may still read what this one writes
    tl.store(p_tokens + req_idx * stride_tokens + length + o, b_token, mask=m)
    tl.store(p_counts + req_idx, end)
    tl.store(p_counts + stride_counts + req_idx, computed + tl.where(done, 0, rows + accepted))
    tl.store(p_done + req_idx, has_stop | done | (end >= limit))


@triton.jit(
    do_not_specialize=["p_req_indices", "p_ids", "p_rows", "p_count", "p_accepted", "p_tokens", "p_parents", "p_path", "stride_parents"]
)
def result_kernel(
    p_out, p_req_indices, p_ids, p_rows, p_sources, p_count, p_accepted, p_failed, p_tokens, p_parents, p_path, stride_sources,
    stride_parents, DRAFTS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """A program is a row of the table. p_parents and p_path are both None for chains."""
    r = tl.program_id(0).to(tl.int64)
    o = tl.arange(0, triton.next_power_of_2(WIDTH))
    m = o < WIDTH
    accepted, failed, count = tl.load(p_accepted + r), tl.load(p_failed + r), tl.load(p_count + r)
    b_token = tl.load(p_tokens + r * WIDTH + o, mask=m, other=0)
    if p_path is not None:
        b_path = tl.load(p_path + r * WIDTH + o, mask=m, other=0)
    if DRAFTS > 0:
        o_draft = tl.arange(0, triton.next_power_of_2(DRAFTS))
        m_draft = o_draft < DRAFTS
        req_idx, b_row = tl.load(p_req_indices + r), tl.load(p_rows + r * (DRAFTS + 1) + 1 + o_draft, mask=m_draft, other=0)
        if p_parents is not None:
            b_parent = tl.load(p_parents + r * stride_parents + o_draft, mask=m_draft, other=0)
        b_source = tl.load(p_sources + req_idx * stride_sources + o_draft, mask=m_draft, other=0)
        b_draft = tl.load(p_ids + b_row, mask=m_draft, other=0)

    p_row = p_out + r * (3 + WIDTH + 2 * DRAFTS)
    if p_path is not None:
        p_row += r * (WIDTH + DRAFTS)
        tl.store(p_row + 3 + WIDTH + 3 * DRAFTS + o, b_path, mask=m)
    tl.store(p_row, accepted)
    tl.store(p_row + 1, (failed != 0).to(tl.int64))
    tl.store(p_row + 2, count)
    tl.store(p_row + 3 + o, b_token, mask=m)
    if DRAFTS > 0:
        p_drafts = p_row + 3 + WIDTH + o_draft
        tl.store(p_drafts, b_draft, mask=m_draft)
        tl.store(p_drafts + DRAFTS, b_source, mask=m_draft)
        if p_parents is not None:
            tl.store(p_drafts + 2 * DRAFTS, b_parent, mask=m_draft)


def row_stride(number: int) -> int:
    """Numbers between the starts of two rows of so many."""
    return number + number % ALIGNED


def place(
    table: RequestTable, req_indices: Tensor, row_span: Tensor, offset: Tensor, query_start_loc: Tensor, drafts: Tensor, samples: Tensor, *,
    start: Tensor | None = None,
) -> PlacedRows:  # fmt: skip
    """See reference.place; all are contiguous int64."""
    rows, requests = row_span.shape[0], req_indices.shape[0]
    out = torch.empty(4 * row_stride(rows) + 3 * row_stride(requests), dtype=torch.int64, device=req_indices.device)
    if requests:
        place_kernel[(triton.cdiv(max(rows, requests), B),)](
            out, table.tokens, table.counts, table.done, table.block_table, req_indices, row_span, offset, query_start_loc, drafts, samples,
            start, rows, requests, table.counts.stride(0), table.tokens.stride(0), table.block_table.stride(0),
            PAGE=table.page_size, B=B, num_warps=1,
        )  # fmt: skip
    of_rows, of_requests = out.split([4 * row_stride(rows), 3 * row_stride(requests)])
    return (*of_rows.view(4, -1)[:, :rows].unbind(), *of_requests.view(3, -1)[:, :requests].unbind())


def following(table: RequestTable, token_req_indices: Tensor, index: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """See reference.following; both are contiguous int64."""
    rows = index.shape[0]
    out = torch.empty(3, row_stride(rows), dtype=torch.int64, device=index.device)
    if rows:
        following_kernel[(triton.cdiv(rows, B),)](
            out, table.tokens, table.block_table, token_req_indices, index, rows, table.tokens.stride(0), table.block_table.stride(0),
            PAGE=table.page_size, B=B, num_warps=1,
        )  # fmt: skip
    ids, after, slots = out[:, :rows].unbind()
    return ids, after, slots


def draft_positions(
    length: Tensor, block_table: Tensor, req_indices: Tensor, lookback: int, steps: int, page_size: int
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """See reference.draft_positions; length and req_indices are contiguous, block_table has contiguous rows."""
    assert steps > 0 and lookback >= 0 and block_table.stride(1) == 1, (steps, lookback, block_table.stride())
    requests = req_indices.shape[0]
    out = torch.empty(lookback + 2 * steps - 1, row_stride(requests), dtype=torch.int64, device=length.device)
    if requests:
        draft_positions_kernel[(lookback + steps, triton.cdiv(requests, B))](
            out, length, block_table, req_indices, requests, lookback, steps, block_table.stride(0), PAGE=page_size, B=B, num_warps=1
        )
    positions, slots = out[:, :requests].split([lookback + steps, steps - 1])
    return positions, slots


def hold(table: RequestTable, req_indices: Tensor, tokens: Tensor, count: Tensor, drawn: tuple[Tensor, Tensor] | None = None) -> None:
    """See reference.hold; req_indices and count are contiguous int64, and `drawn` is contiguous float32."""
    (requests, drafts), (probs, seat_probs), numbers, stride = tokens.shape, drawn or (None, None), 0, 0
    if probs is not None and seat_probs is not None:
        assert probs.is_contiguous() and seat_probs.is_contiguous() and probs.dtype == seat_probs.dtype == torch.float32
        assert len(probs) == requests and probs.shape[2] == seat_probs.shape[2] and probs.shape[1] <= seat_probs.shape[1], (
            probs.shape,
            seat_probs.shape,
        )
        numbers, stride = probs.shape[1] * probs.shape[2], seat_probs.stride(0)
    if requests:
        hold_kernel[(requests, max(1, triton.cdiv(numbers, NUMBERS)))](
            table.tokens, table.counts, req_indices, tokens, count, probs, seat_probs, table.counts.stride(0), table.tokens.stride(0),
            *tokens.stride(), stride, numbers, DRAFTS=drafts, B=NUMBERS, num_warps=1 if probs is None else 8,
        )  # fmt: skip


def advance(
    table: RequestTable, req_indices: Tensor, query_start_loc: Tensor, last_row: Tensor, samples: Tensor, accepted: Tensor, tokens: Tensor
) -> None:
    """See reference.advance; all are contiguous int64, but for the tokens."""
    requests, width = tokens.shape
    if requests:
        advance_kernel[(requests,)](
            table.tokens, table.counts, table.stops, table.done, req_indices, query_start_loc, last_row, samples, accepted,
            tokens.contiguous(), table.counts.stride(0), table.tokens.stride(0), WIDTH=width, STOPS=table.stops.shape[1], num_warps=1,
        )  # fmt: skip


def result_table(
    req_indices: Tensor, ids: Tensor, sample_rows: Tensor, draft_sources: Tensor, num_draft_tokens: Tensor, accepted: Tensor,
    failed: Tensor, tokens: Tensor, parents: Tensor | None = None, path: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """See reference.result_table; all are contiguous, but for the tokens and the rows of `parents`."""
    requests, width = tokens.shape
    drafts, trees = sample_rows.shape[1] - 1, path is not None
    assert trees == (parents is not None) and (drafts > 0 or not trees), (drafts, trees)
    out = torch.empty(requests, 3 + width * (1 + trees) + drafts * (2 + trees), dtype=torch.int64, device=ids.device)
    if requests:
        result_kernel[(requests,)](
            out, req_indices, ids, sample_rows, draft_sources, num_draft_tokens, accepted, failed, tokens.contiguous(), parents, path,
            draft_sources.stride(0), 0 if parents is None else parents.stride(0), DRAFTS=drafts, WIDTH=width, num_warps=1,
        )  # fmt: skip
    return out
