"""Lossy acceptance: off by default, and reported as lossy everywhere.

The two thresholds are SGLang's. Both are implemented as another distribution at each node, in which drafts
are likelier and from which the target then samples as usual.

    acc       one of the drafts that continue a node is sampled with probability min(1, mass / acc) instead
              of their mass
    single    a draft whose own probability is at least this is accepted
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mtpserve.core.batch import Batch


@dataclass(frozen=True, slots=True)
class Thresholds:
    single: float = 1.0
    acc: float = 1.0

    @property
    def lossless(self) -> bool:
        return self.single >= 1 and self.acc >= 1


def lenient(p: Tensor, batch: Batch, thresholds: Thresholds) -> Tensor:
    """p [R, K+1, vocabulary] → the changed distributions, same shape. A greedy request's point masses do not
    change."""
    drafts = batch.drafts
    number = torch.arange(drafts.shape[1], device=p.device)
    parents = number.expand_as(drafts) if batch.tree is None else batch.tree.parents
    valid = (number < batch.num_draft_tokens.unsqueeze(1)).long()
    spans = torch.arange(len(p), device=p.device).unsqueeze(1).expand_as(drafts)
    proposed = (
        torch.zeros(p.shape, dtype=torch.int64, device=p.device).index_put_(
            (spans, parents, drafts), valid, accumulate=True
        )
        > 0
    )
    mass = (p * proposed).sum(-1, keepdim=True)
    share = (mass / thresholds.acc).clamp(max=1)
    within, without = share / mass.clamp(min=1e-30), (1 - share) / (1 - mass).clamp(min=1e-30)
    probs = torch.where(mass > 0, p * torch.where(proposed, within, without), p)
    likeliest, token = (p * proposed).max(-1, keepdim=True)
    one_hot = torch.zeros_like(p).scatter_(-1, token, 1.0)
    return torch.where((likeliest >= thresholds.single) & (likeliest > 0), one_hot, probs)
