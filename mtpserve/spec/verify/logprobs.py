"""Log-probabilities of the tokens that a step commits: the target's, whatever the source of the token."""

from __future__ import annotations

import torch
from torch import Tensor

from mtpserve.core.batch import Batch, Logprobs


def logprobs_of(p: Tensor | None, logits: Tensor, batch: Batch, rows: Tensor, tokens: Tensor) -> Logprobs:
    """Computes log-probabilities from p, the distribution that was sampled from. Uses logits [R, K+1,
    vocabulary] if p is None, and for greedy requests, whose p is a point mass. rows [R, D+1]: the nodes at
    which tokens [R, D+1] were chosen."""
    every = rows.unsqueeze(2).expand(-1, -1, logits.shape[2])
    logp = logits.gather(1, every).float().log_softmax(-1)
    if p is not None:
        greedy = batch.sampler.greedy(batch.req_indices)[:, None, None]
        logp = torch.where(greedy, logp, p.gather(1, every).log())
    return ranked(logp, tokens, batch.sampler.top_logprobs or 0)


def ranked(logp: Tensor, tokens: Tensor, number: int) -> Logprobs:
    """logp [R, n, vocabulary], tokens [R, n]"""
    token_logprobs = logp.gather(2, tokens.unsqueeze(2))
    ranks = (logp > token_logprobs).sum(2) + 1
    top = logp.topk(min(number, logp.shape[2]), 2)
    return Logprobs(token_logprobs.squeeze(2), ranks, top.indices, top.values)
