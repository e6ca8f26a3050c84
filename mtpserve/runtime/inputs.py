"""Spans to batch. The host knows widths; how far a request is, is read from the seats on the device.

span 0: 3 prompt tokens      span 1: 1 token and 2 drafts
rows       0 1 2             3 4 5            cu_q 0 3 6
offset     0 1 2             0 1 2            index = computed[seat] + offset
last_row       2             3
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.functional import pad

from mtpserve.attention.contexts import slots_of
from mtpserve.cache.states import States
from mtpserve.cache.stores import Stores
from mtpserve.core.batch import Batch, Hidden, Sampler, VerifyOutput
from mtpserve.core.plan import SpanPlan
from mtpserve.runtime.device_requests import DeviceRequests
from mtpserve.runtime.runner_request import RunnerRequest
from mtpserve.runtime.transfer import staged

# Fields of a batch that follow from where its rows are.
PLACED = (
    "input_ids",
    "positions",
    "token_indices",
    "slot_mapping",
    "token_req_indices",
    "query_start_loc",
    "seq_lens",
    "last_token_rows",
    "sample_rows",
)

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
    spans, offsets, nodes, query_start_loc, whole, count, lasts, sampled, sampling = staged(
        [row_span, offset, node, ends, lengths, counts, last_row, sample_rows, samples], device
    )
    short = None if depth is None else row_layout(tuple((n, min(d, depth), s) for n, d, s in layout), device)
    return RowLayout(
        spans,
        offsets,
        nodes,
        query_start_loc,
        whole,
        count,
        lasts,
        sampled.view(-1, widest + 1),
        sampling,
        widest,
        max(lengths),
        short,
    )


def prompt_layout(lengths: Tensor, real: Tensor, rows: int) -> RowLayout:
    """lengths [P], `rows` in all, of prompts that end with this step; real [P]: 0 for a span that pads. Its
    rows are all its first one, so that nothing is longer than its seat."""
    ends, row = lengths.cumsum(0), torch.arange(rows, device=lengths.device)
    query_start_loc = pad(ends, (1, 0))
    span = torch.searchsorted(ends, row, right=True)
    none, last = torch.zeros_like(lengths), ends - 1
    offset = (row - query_start_loc[span]) * real[span]
    return RowLayout(
        span,
        offset,
        torch.zeros_like(row),
        query_start_loc,
        lengths,
        none,
        last,
        last.unsqueeze(1),
        real,
        0,
        rows,
        None,
    )


def mixed_layout(decoding: RowLayout, prompts: RowLayout) -> RowLayout:
    """One after the other. Drafts are chains. Logits of a prompt's last row are computed as often as those of
    a request that decodes."""
    spans, rows = decoding.num_tokens.shape[0], decoding.row_span.shape[0]
    return RowLayout(
        row_span=torch.cat([decoding.row_span, prompts.row_span + spans]),
        offset=torch.cat([decoding.offset, prompts.offset]),
        node=torch.cat([decoding.node, prompts.node]),
        query_start_loc=torch.cat([decoding.query_start_loc, prompts.query_start_loc[1:] + rows]),
        num_tokens=torch.cat([decoding.num_tokens, prompts.num_tokens]),
        num_draft_tokens=torch.cat([decoding.num_draft_tokens, prompts.num_draft_tokens]),
        last_token_rows=torch.cat([decoding.last_token_rows, prompts.last_token_rows + rows]),
        sample_rows=torch.cat(
            [decoding.sample_rows, (prompts.sample_rows + rows).expand(-1, decoding.widest + 1)]
        ),
        samples=torch.cat([decoding.samples, prompts.samples]),
        widest=decoding.widest,
        longest=prompts.longest,
        compacted=None,
    )


def is_first(plan: SpanPlan, request: RunnerRequest, lag: int | None) -> bool:
    """Whether it is a request's first span, after pages that another one has computed or, with a lag of 0,
    after nothing."""
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
    batch = place(layout, req_tensors, req_indices, sampler)
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


def place(
    layout: RowLayout,
    req_tensors: DeviceRequests,
    req_indices: Tensor,
    sampler: Sampler,
    start: Tensor | None = None,
) -> Batch:
    """The rows of `layout` from `start` [R] on, or from what is computed, as if all drafts were chains."""
    # The host's counts are bounds.
    ids, index, slots, token_req_indices, seq_lens, num_draft_tokens, samples = req_tensors.place(
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


def compact(
    layout: RowLayout,
    batch: Batch,
    hidden: Hidden,
    verify_output: VerifyOutput,
    req_tensors: DeviceRequests,
    stores: Stores,
    states: States | None,
) -> tuple[Batch, Hidden]:
    """Move what survived of every tree together, so that what follows sees chains: the trunk's KV, what waits
    for its states, and hidden states.

        rows      x 1 2 3 4 5 6      path 0 2 5      →      x 2 5       their KV is now in the slots after x

    Called after the requests were advanced, with the chains' layout. A path shorter than the deepest repeats
    its last node: garbage after what counts.
    """
    assert verify_output.path is not None
    depth = verify_output.path.shape[1] - 1
    start = batch.token_indices[batch.query_start_loc[:-1]]
    chains = place(layout, req_tensors, batch.req_indices, batch.sampler, start)
    # Verification has used up the drafts. What the batch says of the next ones stays.
    chained = batch._replace(
        **{name: getattr(chains, name) for name in PLACED},
        num_draft_tokens=layout.num_draft_tokens,
        tree=None,
        tree_bits=None,
        tree_start=None,
        checkpoint_tokens=None,
        checkpoint_states=None,
    )
    chained = without_stores(chained, batch.unstored)
    node = verify_output.path[layout.row_span, layout.node]
    old = batch.last_token_rows[layout.row_span] + torch.where(
        layout.node > 0, node, layout.offset - layout.num_tokens[layout.row_span] + 1
    )
    # Node j was stored j slots after the root, and so will be the path's j-th.
    deep = torch.arange(1, depth + 1, device=req_tensors.device)
    moved = deep <= verify_output.num_accepted_tokens.unsqueeze(1)
    root = batch.last_token_rows.unsqueeze(1)
    source, target = (
        torch.where(moved, root + verify_output.path[:, 1:], root),
        torch.where(moved, root + deep, root),
    )
    for group in stores.groups:
        slots = slots_of(batch, group)
        stores.move(group, slots[source], slots[target])
    stores.move_entries(
        batch.req_indices,
        verify_output.path[:, 1:],
        batch.token_indices[target],
        batch.slot_mapping[target],
        moved,
    )
    if states is not None:
        states.move(batch.req_indices, verify_output.path[:, 1:])
    return chained, hidden.at(old)
