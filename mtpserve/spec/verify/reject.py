"""Lossless rejection sampling over a chain (Leviathan et al. 2023, https://arxiv.org/abs/2211.17192,
algorithm 1).

Draft x, sampled from q, is accepted with probability min(1, p(x) / q(x)); the first rejected draft is
replaced by a sample from max(p - q, 0), renormalised; if all are accepted, one more token is sampled from p.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mtpserve.core.batch import Batch
from mtpserve.spec.verify.streams import COIN, DRAW


def reject(p: Tensor, batch: Batch, depth: int) -> tuple[Tensor, Tensor]:
    """p [R, K+1, vocabulary] → tokens [R, depth+1], accepted [R]. Undefined for requests whose drafts are not
    a chain sampled from q."""
    spans, device = p.shape[0], p.device
    req_tensors, ids = batch.req_tensors, batch.req_indices
    drafts = batch.drafts[:, :depth]
    number = drafts.shape[1]
    q = req_tensors.draft_probs[ids, :number]  # [R, K, vocabulary]
    length = req_tensors.num_tokens[ids]
    count = batch.num_draft_tokens.clamp(max=number)
    coins = batch.sampler.uniform(ids, length.unsqueeze(1) + torch.arange(number, device=device), COIN)
    accept_mask = coins * at(q, drafts) < at(p[:, :number], drafts)
    accepted = leading(accept_mask, count)
    batch_idx = torch.arange(spans, device=device)
    last = p[batch_idx, accepted]  # [R, vocabulary], the distribution of the token after the accepted drafts
    if number:
        rejected = (accepted < count).unsqueeze(1)
        rest = (last - q[batch_idx, accepted.clamp(max=number - 1)]).clamp_(min=0)
        # If p = q up to rounding, nothing is left of p - q; then the rejection was due to rounding too, and p
        # itself is sampled.
        last = torch.where(rejected & (rest.sum(-1, keepdim=True) > 0), rest, last)
    tokens = torch.cat([drafts, drafts.new_zeros(spans, 1 + depth - number)], 1)
    tokens[batch_idx, accepted] = batch.sampler.choose(last, ids, length + accepted, DRAW)
    return tokens, accepted


def leading(accept_mask: Tensor, count: Tensor) -> Tensor:
    """accept_mask [R, K] bool, count [R] valid drafts → [R], the number kept before the first that is not."""
    valid = torch.arange(accept_mask.shape[1], device=accept_mask.device) < count.unsqueeze(1)
    return (accept_mask & valid).long().cumprod(1).sum(1)


def at(probs: Tensor, tokens: Tensor) -> Tensor:
    """probs [R, K, vocabulary], tokens [R, K] → [R, K] float64"""
    return probs.gather(-1, tokens.unsqueeze(-1)).squeeze(-1).double()
