"""The next draft of each row, from a draft model's logits. Plain torch; spec/cpu.py has the same in one
call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from mtpserve.core.batch import Sampler
from mtpserve.spec.verify.streams import DRAFT, DRAW

Propose = Callable[[Tensor, Tensor, Tensor, Sampler, Tensor | None], Tensor]


def valid(logits: Tensor) -> Tensor:
    """[rows, vocabulary], whatever a draft model computed → logits of a distribution."""
    # -inf means forbidden and stays; a row in which every token is forbidden becomes uniform.
    logits = torch.nan_to_num(logits, nan=0.0, neginf=-torch.inf)
    return logits.masked_fill((logits == -torch.inf).all(-1, keepdim=True), 0.0)


def propose(logits: Tensor, req_indices: Tensor, index: Tensor, sampler: Sampler, q: Tensor | None) -> Tensor:
    """logits [rows, vocabulary] after the requests' rules, index [rows] of the tokens → the drafts [rows].
    What they were drawn from is written to q [rows, vocabulary] float32; None if all are point masses. If
    logits are not finite, it may propose any token, from a valid distribution."""
    if sampler.all_greedy:
        return logits.argmax(-1)
    probs = sampler.probs(valid(logits), req_indices)
    if sampler.all_coupled:
        return sampler.choose(probs, req_indices, index, DRAW)
    assert q is not None
    q.copy_(probs)
    tokens, coupled = sampler.choose(probs, req_indices, index, DRAFT), sampler.coupled(req_indices)
    return (
        tokens
        if coupled is None
        else torch.where(coupled, sampler.choose(probs, req_indices, index, DRAW), tokens)
    )


@dataclass(frozen=True, slots=True)
class ReducedHead:
    """A draft head over the most frequent tokens: drafting multiplies only their rows of the language-model
    head.

    Other tokens are never proposed and their q is zero. Verification uses the whole vocabulary, so it stays
    lossless.
    """

    tokens: Tensor  # [n] int64, ascending, so that ties are broken as in the whole vocabulary
    vocab: int
    multiply: Callable[[Tensor, int], Tensor]  # [rows, hidden], the drafts before them → [rows, n] float32

    def spread(self, logits: Tensor) -> Tensor:
        """[rows, n] → [rows, vocabulary]; -inf for tokens that are not in the map."""
        return logits.new_full((len(logits), self.vocab), -torch.inf).index_copy(1, self.tokens, logits)
