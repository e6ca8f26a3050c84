"""The next draft of each row, from a draft model's logits. Plain torch; spec/cpu.py has the same in one call."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from mtpserve.core.protocols import Sampler
from mtpserve.spec.streams import DRAFT, DRAW

Propose = Callable[[Tensor, Tensor, Tensor, Sampler], tuple[Tensor, Tensor | None]]


def valid(logits: Tensor) -> Tensor:
    """[rows, vocabulary], whatever a draft model computed → logits of a distribution."""
    # -inf means forbidden and stays; a row in which every token is forbidden becomes uniform.
    logits = torch.nan_to_num(logits, nan=0.0, neginf=-torch.inf)
    return torch.where((logits == -torch.inf).all(-1, keepdim=True), 0.0, logits)


def propose(logits: Tensor, seat_ids: Tensor, index: Tensor, sampler: Sampler) -> tuple[Tensor, Tensor | None]:
    """logits [rows, vocabulary] after the requests' rules, index [rows] of the tokens → the drafts [rows], and what they were drawn from
    [rows, vocabulary]; None if all are point masses. Where logits are not finite any token may be proposed, from a valid distribution."""
    if sampler.all_greedy:
        return logits.argmax(-1), None
    q = sampler.probs(valid(logits), seat_ids)
    if sampler.all_coupled:
        return sampler.choose(q, seat_ids, index, DRAW), None
    tokens, coupled = sampler.choose(q, seat_ids, index, DRAFT), sampler.coupled(seat_ids)
    if coupled is not None:
        tokens = torch.where(coupled, sampler.choose(q, seat_ids, index, DRAW), tokens)
    return tokens, q
