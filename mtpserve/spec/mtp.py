"""Drafting with the checkpoint's multi-token-prediction layer, used again and again on its own output (EAGLE's recurrence).

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

from mtpserve.core.batch import Batch, Drafts, Hidden, Verdict
from mtpserve.core.protocols import AttentionBackend, CausalModel
from mtpserve.core.shape import SpanShape
from mtpserve.spec.accept import draw
from mtpserve.spec.streams import DRAFT


class MTPDrafter:
    def __init__(self, model: CausalModel, attention: AttentionBackend, max_drafts: int) -> None:
        self.model, self.attention, self.max_drafts = model, attention, max_drafts

    def draft(self, batch: Batch, hidden: Hidden, verdict: Verdict, want: int) -> Drafts | None:
        seats = batch.seats
        # The token after each row: prompt, accepted draft or the verdict's own, all in one place by now.
        shifted = replace(batch, ids=seats.tokens[batch.row_seats, batch.index + 1])
        absorbed = self.model.mtp(shifted.ids, shifted.positions, hidden.recycle, self.attention.plan(shifted))
        if want == 0:
            return None
        chosen = batch.last_row + verdict.accepted * batch.samples
        seat_ids = batch.seat_ids
        if batch.draft_spans is not None:
            chosen, seat_ids = chosen[batch.draft_spans], seat_ids[batch.draft_spans]
        state = Hidden(absorbed.head[chosen], absorbed.recycle[chosen])
        length = seats.length[seat_ids]
        chance = None
        if not batch.sampler.all_greedy:
            index = length.unsqueeze(1) + torch.arange(want, device=length.device)
            chance = batch.sampler.uniform(seat_ids, index)[..., DRAFT]
        tokens: list[Tensor] = []
        probs: list[Tensor] = []
        for step in range(want):
            if step:
                state = self.again(batch, seat_ids, tokens[-1], length + (step - 2), state)
            token, q = self.propose(state.head, seat_ids, batch, None if chance is None else chance[:, step])
            tokens.append(token)
            if q is not None:
                probs.append(q)
        return Drafts(torch.stack(tokens, 1), torch.stack(probs, 1) if probs else None)

    def again(self, batch: Batch, seat_ids: Tensor, ids: Tensor, index: Tensor, state: Hidden) -> Hidden:
        """One row per request: token `ids` stands at index+1, the row at index."""
        one_each = torch.arange(len(seat_ids) + 1, device=index.device)
        rows = replace(
            batch,
            ids=ids,
            positions=index,
            index=index,
            slots=batch.seats.slots(seat_ids, index),
            row_seats=seat_ids,
            seat_ids=seat_ids,
            cu_q=one_each,
            kv_len=index + 1,
            shape=SpanShape.chain(0),
        )
        return self.model.mtp(ids, index, state.recycle, self.attention.plan(rows))

    def propose(self, head: Tensor, seat_ids: Tensor, batch: Batch, chance: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """→ token [D], the distribution it was drawn from [D, vocabulary] or None for a greedy batch."""
        logits = self.model.logits(head)
        if chance is None:
            return logits.argmax(-1), None
        # A draft is a hint: a head that went wrong proposes anything, but from a distribution that is one.
        q = batch.sampler.probs(torch.nan_to_num(logits, nan=0.0), seat_ids)
        return draw(q, chance), q
