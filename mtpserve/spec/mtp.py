"""Drafting a chain with the checkpoint's multi-token-prediction layer, used again and again on its own output (EAGLE's recurrence).

Row p pairs the trunk's hidden state at p with the embedding of token p+1, stands at position and slot p, predicts token p+2.
One pass over the step's own rows (absorb) writes the layer's keys for all that was just computed and gives the first draft;
each further draft is one row per request, fed with the layer's own hidden state:

    absorb   rows start … computed-1   (trunk's hidden)      → draft 1
    again    row  computed             (own hidden, draft 1) → draft 2
    again    row  computed+1           (own hidden, draft 2) → draft 3

Rows of rejected drafts are absorbed too, as garbage: the next step's absorb overwrites them before anything reads them.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from mtpserve.core.batch import Batch, Drafts, Hidden, Verdict, Want
from mtpserve.core.draft_sizes import DraftSizes
from mtpserve.core.protocols import AttentionBackend, CausalModel
from mtpserve.spec.reduced import ReducedHead
from mtpserve.spec.streams import DRAFT, DRAW


class MTPDrafter:
    """`coupled`: drafts race with the noise of the target's own choice, for use beside other sources (spec/accept)."""

    graph_safe = True

    def __init__(
        self, model: CausalModel, attention: AttentionBackend, sizes: DraftSizes, coupled: bool = False, reduced: ReducedHead | None = None
    ) -> None:
        self.model, self.attention, self.sizes, self.coupled, self.reduced = model, attention, sizes, coupled, reduced

    def draft(self, batch: Batch, hidden: Hidden, verdict: Verdict, want: Want) -> Drafts | None:
        state, seat_ids = absorb(self.model, self.attention, batch, hidden, verdict)
        steps = min(want.deepest, self.sizes.steps)
        if steps == 0:
            return None
        sampler, length = batch.sampler, batch.seats.length[seat_ids]
        # A greedy request's distributions are point masses: its draft is the argmax whatever the stream.
        coupled = sampler.coupled(seat_ids)
        tokens, probs = length.new_zeros(len(length), 0), []
        for step in range(steps):
            if step:
                index = length + (step - 2)
                rows = step_rows(batch, seat_ids, tokens[:, -1], index, index)
                state = self.model.mtp(rows.ids, rows.positions, state.recycle, self.attention.plan(rows))
            count = length.new_full(length.shape, step)
            logits, columns = head_logits(self.model, self.reduced, state.head, batch, seat_ids, tokens, count)
            if sampler.all_greedy:
                token = logits.argmax(-1) if columns is None else columns[logits.argmax(-1)]
            else:
                q = sampler.probs(logits, seat_ids)
                probs.append(q)
                token = sampler.choose(q, seat_ids, length + step, DRAW if sampler.all_coupled else DRAFT)
                if coupled is not None and not sampler.all_coupled:
                    token = torch.where(coupled, sampler.choose(q, seat_ids, length + step, DRAW), token)
            tokens = torch.cat([tokens, token.unsqueeze(1)], 1)
        return Drafts(tokens, want.each.clamp(max=steps), torch.stack(probs, 1) if probs and not sampler.all_coupled else None)


def absorb(model: CausalModel, attention: AttentionBackend, batch: Batch, hidden: Hidden, verdict: Verdict) -> tuple[Hidden, Tensor]:
    """→ the layer's output for the last token of every request that may be drafted for, and their seats."""
    seats = batch.seats
    # The token after each row: prompt, accepted draft or the verdict's own, all in one place by now.
    shifted = replace(batch, ids=seats.tokens[batch.row_seats, batch.index + 1])
    absorbed = model.mtp(shifted.ids, shifted.positions, hidden.recycle, attention.plan(shifted))
    chosen, seat_ids = batch.last_row + verdict.accepted * batch.samples, batch.seat_ids
    if batch.draft_spans is not None:
        chosen, seat_ids = chosen[batch.draft_spans], seat_ids[batch.draft_spans]
    return Hidden(absorbed.head[chosen], absorbed.recycle[chosen]), seat_ids


def step_rows(batch: Batch, seat_ids: Tensor, ids: Tensor, index: Tensor, positions: Tensor) -> Batch:
    """One row for each of the tokens `ids` [rows], which stand at index+1; the row stands at index. Rows of one request together."""
    rows, device = len(seat_ids), index.device
    each = len(ids) // max(rows, 1)
    owners = seat_ids.repeat_interleave(each)
    return replace(
        batch,
        ids=ids,
        positions=positions,
        index=index,
        slots=batch.seats.slots(owners, index),
        row_seats=owners,
        seat_ids=seat_ids,
        cu_q=torch.arange(rows + 1, device=device) * each,
        kv_len=index.view(rows, each)[:, -1] + 1,
        tree=None,
        tree_bits=None,
        tree_start=None,
    )


def head_logits(
    model: CausalModel, reduced: ReducedHead | None, head: Tensor, batch: Batch, seat_ids: Tensor, path: Tensor, count: Tensor
) -> tuple[Tensor, Tensor | None]:
    """head [rows, hidden], path [rows, D] the drafts so far → what the request's rules leave of the logits, and the token that each
    column stands for (None: all, in order). Rules and laws know the whole vocabulary; the argmax alone can do with less.

    A draft is a hint: a head that went wrong proposes anything, but from a distribution that is one.
    """
    sampler, columns = batch.sampler, None
    logits = model.logits(head) if reduced is None else reduced.multiply(head)
    if reduced is not None and sampler.all_greedy and not sampler.has_rules:
        columns = reduced.tokens
    elif reduced is not None:
        logits = reduced.spread(logits)
    logits = sampler.processed(logits, seat_ids, path, count)
    # -inf means forbidden, and stays; a row with nothing else is as good as one without an opinion.
    logits = torch.nan_to_num(logits, nan=0.0, neginf=-torch.inf)
    return torch.where((logits == -torch.inf).all(-1, keepdim=True), 0.0, logits), columns
