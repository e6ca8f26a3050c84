"""Log-probabilities of what a step commits: always the target's, whoever proposed the token."""

from __future__ import annotations

import torch
from torch import Tensor

from mtpserve.core.batch import Batch, Logprobs


def logprobs_of(p: Tensor | None, logits: Tensor, batch: Batch, rows: Tensor, tokens: Tensor) -> Logprobs:
    """p None: of logits [R, K+1, vocabulary]; else of the distribution that was sampled from, but for greedy requests, whose point
    mass would say nothing. rows [R, D+1], the nodes from which tokens [R, D+1] come."""
    every = rows.unsqueeze(2).expand(-1, -1, logits.shape[2])
    logp = logits.gather(1, every).float().log_softmax(-1)
    if p is not None:
        greedy = batch.sampler.greedy(batch.seat_ids)[:, None, None]
        logp = torch.where(greedy, logp, p.gather(1, every).log())
    return ranked(logp, tokens, batch.sampler.top_logprobs or 0)


def ranked(logp: Tensor, tokens: Tensor, number: int) -> Logprobs:
    """logp [R, n, vocabulary], tokens [R, n]"""
    chosen = logp.gather(2, tokens.unsqueeze(2))
    ranks = (logp > chosen).sum(2) + 1
    top = logp.topk(min(number, logp.shape[2]), 2)
    return Logprobs(chosen.squeeze(2), ranks, top.indices, top.values)
