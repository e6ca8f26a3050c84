"""The verdict over a chain of drafts: lossless rejection sampling, of which greedy decoding and plain sampling are special cases.

Draft x drawn from q is kept with probability min(1, p(x) / q(x)); the first one that is not is replaced by a draw from
max(p - q, 0), renormalised; after a chain that is kept whole one more token is drawn from p (Leviathan et al. 2023,
https://arxiv.org/abs/2211.17192, algorithm 1). A greedy request's p and q are point masses: the same rule compares argmaxes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mtpserve.core.batch import Batch, Verdict
from mtpserve.spec.streams import COIN, DRAW


def accept(logits: Tensor, batch: Batch) -> Verdict:
    """logits [R, K+1, vocabulary] of the rows `batch.sample_rows`."""
    drafts = batch.ids[batch.sample_rows[:, 1:]]  # [R, K]
    best = logits.max(-1)
    if batch.sampler.all_greedy:
        accepted = leading(drafts == best.indices[:, :-1], batch.draft_count)
        tokens = best.indices  # a kept draft is the argmax
    else:
        tokens, accepted = accept_sampled(logits, drafts, batch)
    # NaN and infinity show in a row's maximum. Rows behind the last kept draft decided nothing and may be anything.
    broken = ~torch.isfinite(best.values)
    decided = torch.arange(logits.shape[1], device=logits.device) <= accepted.unsqueeze(1)
    return Verdict(tokens, accepted, (broken & decided).any(1))


def leading(kept: Tensor, count: Tensor) -> Tensor:
    """kept [R, K] bool, count [R] valid drafts → [R] how many are kept before the first that is not."""
    valid = torch.arange(kept.shape[1], device=kept.device) < count.unsqueeze(1)
    return (kept & valid).long().cumprod(1).sum(1)


def accept_sampled(logits: Tensor, drafts: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """→ tokens [R, K+1], accepted [R]"""
    spans, rows = logits.shape[:2]
    seats, ids = batch.seats, batch.seat_ids
    p = batch.sampler.probs(logits.flatten(0, 1), ids.repeat_interleave(rows)).unflatten(0, (spans, rows))
    q = seats.draft_probs[ids, : rows - 1]  # [R, K, vocabulary]
    index = seats.length[ids].unsqueeze(1) + torch.arange(rows, device=logits.device)
    chance = batch.sampler.uniform(ids, index)  # [R, K+1, 3]
    kept = chance[:, :-1, COIN] * at(q, drafts) < at(p[:, :-1], drafts)
    accepted = leading(kept, batch.draft_count)
    each = torch.arange(spans, device=logits.device)
    last = p[each, accepted]  # the distribution of the token that the drafts did not decide
    if rows > 1:
        rejected = (accepted < batch.draft_count).unsqueeze(1)
        rest = (last - q[each, accepted.clamp(max=rows - 2)]).clamp_(min=0)
        # p = q up to rounding leaves nothing over; then the rejection was rounding too, and p itself is the law.
        last = torch.where(rejected & (rest.sum(-1, keepdim=True) > 0), rest, last)
    tokens = torch.cat([drafts, drafts.new_zeros(spans, 1)], 1)
    tokens[each, accepted] = draw(last, chance[each, accepted, DRAW])
    return tokens, accepted


def at(probs: Tensor, tokens: Tensor) -> Tensor:
    """probs [R, K, vocabulary], tokens [R, K] → [R, K] float64"""
    return probs.gather(-1, tokens.unsqueeze(-1)).squeeze(-1).double()


def draw(weights: Tensor, chance: Tensor) -> Tensor:
    """weights [rows, vocabulary] ≥ 0, not normalised; chance [rows] in [0, 1) → [rows], the inverse of the cumulated weights.

    Always an index in the vocabulary, and one whose weight is positive unless none is.
    """
    cumulated = weights.double().cumsum(-1)  # float32 would lose the tail of a large vocabulary
    total = cumulated[:, -1:]
    point = torch.minimum(chance.unsqueeze(1) * total, torch.nextafter(total, torch.zeros_like(total)))
    found = torch.searchsorted(cumulated, point, right=True).squeeze(1)
    return found.clamp_(max=weights.shape[1] - 1)
