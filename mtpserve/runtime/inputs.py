"""Spans to batch. The host knows widths; how far a request is, is read from the seats on the device.

span 0: 3 prompt tokens      span 1: 1 token and 2 drafts
rows       0 1 2             3 4 5            query_start_loc 0 3 6
offset     0 1 2             0 1 2            index = computed[seat] + offset
last_row       2             3
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from mtpserve.core.batch import Batch, Sampler
from mtpserve.core.plan import SpanPlan
from mtpserve.runtime.device_requests import DeviceRequests
from mtpserve.runtime.runner_request import RunnerRequest
from mtpserve.runtime.transfer import staged

Layout = tuple[tuple[int, int, bool], ...]  # per span: committed tokens, drafts, whether it samples


@dataclass(frozen=True, slots=True)
class RowLayout:
    """What follows from the widths alone; steady decoding repeats it step after step, so it is kept."""

    row_span: Tensor  # [T]
    offset: Tensor  # [T]
    node: Tensor  # [T], 0 for committed rows
    query_start_loc: Tensor  # [R+1]
    num_tokens: Tensor  # [R], committed tokens
    num_draft_tokens: Tensor  # [R]
    last_token_rows: Tensor  # [R]
    sample_rows: Tensor  # [R, K+1]
    samples: Tensor  # [R]
    widest: int
    longest: int  # the most committed tokens of a span
    compacted: RowLayout | None  # what is left of it when every span has one path of its tree


@lru_cache(maxsize=64)
def row_layout(layout: Layout, device: torch.device, depth: int | None = None) -> RowLayout:
    """`depth` of the deepest draft, where drafts may branch."""
    row_span: list[int] = []
    offset: list[int] = []
    node: list[int] = []
    ends, last_row, sample_rows = [0], list[int](), list[int]()
    widest = max(drafts for _, drafts, _ in layout)
    for r, (length, drafts, _) in enumerate(layout):
        width = length + drafts
        last = ends[-1] + length - 1
        row_span += [r] * width
        offset += range(width)
        node += [0] * (length - 1) + list(range(drafts + 1))
        last_row.append(last)
        sample_rows += [last + min(i, drafts) for i in range(widest + 1)]
        ends.append(ends[-1] + width)
    lengths, counts, samples = ([int(span[i]) for span in layout] for i in range(3))
    spans, offsets, nodes, query_start_loc, num_tokens, count, lasts, sampled, sampling = staged(
        [row_span, offset, node, ends, lengths, counts, last_row, sample_rows, samples], device
    )
    short = None if depth is None else row_layout(tuple((n, min(d, depth), s) for n, d, s in layout), device)
    return RowLayout(
        spans,
        offsets,
        nodes,
        query_start_loc,
        num_tokens,
        count,
        lasts,
        sampled.view(-1, widest + 1),
        sampling,
        widest,
        max(lengths),
        short,
    )


def is_first(plan: SpanPlan, request: RunnerRequest, lag: int | None) -> bool:
    """True for a request's first span that follows pages of another request. With a lag of 0 it may follow
    nothing."""
    new_request = request.new_request
    return plan.start == new_request.num_computed_tokens and (
        plan.start < new_request.num_shared_tokens
        or lag == 0
        or (lag is not None and new_request.num_shared_tokens > 0)
    )


def after_others(
    plans: Seq[SpanPlan], requests: Seq[RunnerRequest], lag: int | None
) -> tuple[list[int], list[int]]:
    """`Batch.resumed` and `Batch.unstored`. With a draft model of lag 0 the first row of every
    request is missing, too."""
    resumed, unstored = list[int](), list[int]()
    for r, (plan, request) in enumerate(zip(plans, requests, strict=True)):
        if is_first(plan, request, lag):
            (unstored if plan.start < request.new_request.num_shared_tokens else resumed).append(r)
    return resumed, unstored


def build(
    layout: RowLayout, req_tensors: DeviceRequests, req_indices: Tensor, sampler: Sampler, has_trees: bool
) -> Batch:
    """The rows after what is computed, of chains or trees."""
    batch = build_chains(layout, req_tensors, req_indices, sampler)
    if not has_trees or layout.widest == 0:
        return batch
    tree = req_tensors.waiting_tree(req_indices, layout.widest)
    # Siblings share a position, not a slot; a node sees its ancestors and what is committed.
    root = batch.token_indices[layout.last_token_rows]
    committed = layout.node == 0
    depths = tree.depths[layout.row_span, layout.node]
    positions = torch.where(committed, batch.token_indices, root[layout.row_span] + depths)
    bits = tree.ancestors[layout.row_span, layout.node].masked_fill(committed, -1)
    return batch._replace(positions=positions, tree=tree, tree_bits=bits, tree_start=root)


def without_stores(batch: Batch, spans: Tensor | None) -> Batch:
    """The first rows of these spans are stored in the page that pads batches."""
    if spans is None:
        return batch
    return batch._replace(
        slot_mapping=batch.slot_mapping.index_fill(
            0, batch.query_start_loc[spans], batch.req_tensors.padding_slots[0]
        ),
        unstored=spans,
    )


def build_chains(
    layout: RowLayout,
    req_tensors: DeviceRequests,
    req_indices: Tensor,
    sampler: Sampler,
    start: Tensor | None = None,
) -> Batch:
    """The rows of `layout` from `start` [R] on, or from what is computed, as if all drafts were chains."""
    # The host's counts are bounds.
    ids, index, slots, token_req_indices, seq_lens, num_draft_tokens, samples = req_tensors.place_rows(
        req_indices,
        layout.row_span,
        layout.offset,
        layout.query_start_loc,
        layout.num_draft_tokens,
        layout.samples,
        start,
    )
    return Batch(
        input_ids=ids,
        positions=index,
        token_indices=index,
        slot_mapping=slots,
        token_req_indices=token_req_indices,
        req_indices=req_indices,
        query_start_loc=layout.query_start_loc,
        seq_lens=seq_lens,
        num_draft_tokens=num_draft_tokens,
        last_token_rows=layout.last_token_rows,
        sample_rows=layout.sample_rows,
        samples=samples,
        longest=layout.longest,
        req_tensors=req_tensors,
        sampler=sampler,
    )
