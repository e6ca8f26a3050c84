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
from mtpserve.core.batch import Batch, Hidden, Keep, Sampler, Verdict, Want
from mtpserve.core.plan import SpanPlan
from mtpserve.runtime.records import Record
from mtpserve.runtime.seats import SeatTensors
from mtpserve.runtime.transfer import staged

Layout = tuple[tuple[int, int, bool], ...]  # per span: committed tokens, drafts, whether it samples


@dataclass(frozen=True, slots=True)
class RowLayout:
    """What follows from the widths alone; steady decoding repeats it step after step, so it is kept."""

    row_span: Tensor  # [T]
    offset: Tensor  # [T]
    node: Tensor  # [T], 0 for committed rows
    cu_q: Tensor  # [R+1]
    length: Tensor  # [R], committed tokens
    draft_count: Tensor  # [R]
    last_row: Tensor  # [R]
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
    spans, offsets, nodes, cu_q, whole, count, lasts, sampled, sampling = staged(
        [row_span, offset, node, ends, lengths, counts, last_row, sample_rows, samples], device
    )
    short = None if depth is None else row_layout(tuple((n, min(d, depth), s) for n, d, s in layout), device)
    return RowLayout(spans, offsets, nodes, cu_q, whole, count, lasts, sampled.view(-1, widest + 1), sampling, widest, max(lengths), short)


def prompt_layout(lengths: Tensor, real: Tensor, rows: int) -> RowLayout:
    """lengths [P], `rows` in all, of prompts that end with this step; real [P]: 0 for a span that pads. Its rows are all its first one,
    so that nothing is longer than its seat."""
    ends, row = lengths.cumsum(0), torch.arange(rows, device=lengths.device)
    cu_q = pad(ends, (1, 0))
    span = torch.searchsorted(ends, row, right=True)
    none, last = torch.zeros_like(lengths), ends - 1
    offset = (row - cu_q[span]) * real[span]
    return RowLayout(span, offset, torch.zeros_like(row), cu_q, lengths, none, last, last.unsqueeze(1), real, 0, rows, None)


def mixed_layout(decoding: RowLayout, prompts: RowLayout) -> RowLayout:
    """One after the other. Drafts are chains. Logits of a prompt's last row are computed as often as those of a request that decodes."""
    spans, rows = decoding.length.shape[0], decoding.row_span.shape[0]
    return RowLayout(
        row_span=torch.cat([decoding.row_span, prompts.row_span + spans]),
        offset=torch.cat([decoding.offset, prompts.offset]),
        node=torch.cat([decoding.node, prompts.node]),
        cu_q=torch.cat([decoding.cu_q, prompts.cu_q[1:] + rows]),
        length=torch.cat([decoding.length, prompts.length]),
        draft_count=torch.cat([decoding.draft_count, prompts.draft_count]),
        last_row=torch.cat([decoding.last_row, prompts.last_row + rows]),
        sample_rows=torch.cat([decoding.sample_rows, (prompts.sample_rows + rows).expand(-1, decoding.widest + 1)]),
        samples=torch.cat([decoding.samples, prompts.samples]),
        widest=decoding.widest,
        longest=prompts.longest,
        compacted=None,
    )


@dataclass(frozen=True, slots=True)
class Rows:
    """A batch as the host describes it: all that a step needs in addition to the seats. `trees`: the drafts of some request branch."""

    layout: RowLayout
    seat_ids: Tensor  # [R]
    draft_spans: Tensor | None  # [D]
    want: Want
    trees: bool
    sampler: Sampler
    resumed: Tensor | None = None  # [N] spans that start right after pages of another request
    unstored: Tensor | None = None  # [N] spans whose first token is in such a page: it is computed again, and not stored
    predictions: tuple[Tensor, Tensor] | None = None  # see Batch
    keep: Keep | None = None  # see Batch


def is_first(plan: SpanPlan, record: Record, lag: int | None) -> bool:
    """Whether it is a request's first span, after pages that another one has computed or, with a lag of 0, after nothing."""
    given = record.admission
    return plan.start == given.computed and (plan.start < given.shared or lag == 0 or (lag is not None and given.shared > 0))


def after_others(plans: Seq[SpanPlan], records: Seq[Record], lag: int | None) -> tuple[list[int], list[int]]:
    """`Rows.resumed` and `Rows.unstored`. With a draft model of lag 0 the first row of every request is missing, too."""
    resumed, unstored = list[int](), list[int]()
    for r, (plan, record) in enumerate(zip(plans, records, strict=True)):
        if is_first(plan, record, lag):
            (unstored if plan.start < record.admission.shared else resumed).append(r)
    return resumed, unstored


def build(given: Rows, seats: SeatTensors) -> Batch:
    rows = given.layout
    batch = place(rows, seats, given.seat_ids, given.sampler, given.draft_spans)
    batch = batch._replace(resumed=given.resumed, predictions=given.predictions, keep=given.keep)
    batch = without_stores(batch, given.unstored)
    if not given.trees or rows.widest == 0:
        return batch
    tree = seats.waiting_tree(given.seat_ids, rows.widest)
    # Siblings share a position, not a slot; a node sees its ancestors and what is committed.
    root = batch.index[rows.last_row]
    committed = rows.node == 0
    positions = torch.where(committed, batch.index, root[rows.row_span] + tree.depths[rows.row_span, rows.node])
    bits = tree.ancestors[rows.row_span, rows.node].masked_fill(committed, -1)
    return batch._replace(positions=positions, tree=tree, tree_bits=bits, tree_start=root)


def without_stores(batch: Batch, spans: Tensor | None) -> Batch:
    """The first rows of these spans are stored in the page that pads batches."""
    if spans is None:
        return batch
    return batch._replace(slots=batch.slots.index_fill(0, batch.cu_q[spans], batch.seats.spare_slots[0]), unstored=spans)


def place(
    rows: RowLayout, seats: SeatTensors, seat_ids: Tensor, sampler: Sampler, draft_spans: Tensor | None, start: Tensor | None = None
) -> Batch:
    """The rows of `rows` from `start` [R] on, or from what is computed, as if all drafts were chains."""
    # The host's counts are bounds.
    placed = seats.place(seat_ids, rows.row_span, rows.offset, rows.cu_q, rows.draft_count, rows.samples, start)
    return Batch(
        ids=placed.ids,
        positions=placed.index,
        index=placed.index,
        slots=placed.slots,
        row_seats=placed.row_seats,
        seat_ids=seat_ids,
        cu_q=rows.cu_q,
        kv_len=placed.kv_len,
        draft_count=placed.draft_count,
        last_row=rows.last_row,
        sample_rows=rows.sample_rows,
        samples=placed.samples,
        longest=rows.longest,
        draft_spans=draft_spans,
        seats=seats,
        sampler=sampler,
    )


def compact(
    rows: RowLayout, batch: Batch, hidden: Hidden, verdict: Verdict, seats: SeatTensors, stores: Stores, states: States | None
) -> tuple[Batch, Hidden]:
    """Move what survived of every tree together, so that what follows sees chains: the trunk's KV, what waits for its states, and hidden
    states.

        rows      x 1 2 3 4 5 6      path 0 2 5      →      x 2 5       their KV is now in the slots after x

    Called after the seats were advanced, with the chains' layout. A path shorter than the deepest repeats its last node: garbage after
    what counts.
    """
    assert verdict.path is not None
    depth = verdict.path.shape[1] - 1
    start = batch.index[batch.cu_q[:-1]]
    chained = place(rows, seats, batch.seat_ids, batch.sampler, batch.draft_spans, start)
    # The verdict has used up the drafts.
    chained = chained._replace(draft_count=rows.draft_count, samples=batch.samples, resumed=batch.resumed, predictions=batch.predictions)
    chained = without_stores(chained, batch.unstored)
    node = verdict.path[rows.row_span, rows.node]
    old = batch.last_row[rows.row_span] + torch.where(rows.node > 0, node, rows.offset - rows.length[rows.row_span] + 1)
    # Node j was stored j slots after the root, and so will be the path's j-th.
    deep = torch.arange(1, depth + 1, device=seats.device)
    moved = deep <= verdict.accepted.unsqueeze(1)
    root = batch.last_row.unsqueeze(1)
    source, target = torch.where(moved, root + verdict.path[:, 1:], root), torch.where(moved, root + deep, root)
    for group in stores.groups:
        slots = slots_of(batch, group)
        stores.move(group, slots[source], slots[target])
    stores.move_entries(batch.seat_ids, verdict.path[:, 1:], batch.index[target], batch.slots[target], moved)
    if states is not None:
        states.move(batch.seat_ids, verdict.path[:, 1:])
    return chained, hidden.at(old)
