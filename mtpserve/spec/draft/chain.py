"""Drafting a chain with a draft model, applied repeatedly to its own output (EAGLE's recurrence,
https://arxiv.org/abs/2401.15077).

absorb   rows of the step's tokens       (trunk's features)        → draft 1
step     the row of draft 1              (own output)              → draft 2
step     the row of draft 2              (own output)              → draft 3
"""

from __future__ import annotations

import torch
from torch import Tensor

from mtpserve.core.batch import Batch, Drafts, Hidden, VerifyOutput
from mtpserve.core.spec_sizes import SpecSizes
from mtpserve.spec.draft.passes import DraftPasses


class ChainDrafter:
    """core.protocols.Drafter. `coupled`: drafts are sampled with the noise of the target's choice, for use
    with other sources (spec/verify/accept)."""

    graph_safe = True

    def __init__(self, passes: DraftPasses, sizes: SpecSizes, coupled: bool = False) -> None:
        self.passes, self.sizes, self.coupled = passes, sizes, coupled
        self.features, self.lag = passes.model.features, passes.model.lag

    def draft(self, batch: Batch, hidden: Hidden, verify_output: VerifyOutput) -> Drafts | None:
        hidden = self.passes.joined(batch, hidden, verify_output)
        steps = min(batch.draft_depth, self.sizes.steps)
        if steps == 0:
            self.passes.skip(batch, hidden, verify_output)
            return None
        assert batch.num_draft_steps is not None
        tokens, probs = (self.passes.draft_chain or one_by_one)(
            self.passes, batch, hidden, verify_output, steps
        )
        count = (
            batch.num_draft_steps
            if batch.max_draft_tokens is None
            else torch.minimum(batch.num_draft_steps, batch.max_draft_tokens)
        )
        return Drafts(tokens, count if batch.draft_depth <= steps else count.clamp(max=steps), probs)

    def store_deferred_kv(self, batch: Batch) -> None:
        self.passes.store_deferred_kv(batch)


def one_by_one(
    passes: DraftPasses, batch: Batch, hidden: Hidden, verify_output: VerifyOutput, steps: int
) -> tuple[Tensor, Tensor | None]:
    """spec.passes.DraftChain, by the passes of any draft model on any device."""
    state, req_indices = passes.extend(batch, hidden, verify_output)
    sampler, req_tensors, lookback = batch.sampler, batch.req_tensors, passes.model.lag + 1
    # positions[i] is length - lookback + i
    positions, slots = passes.draft_positions(
        req_tensors.num_tokens, req_tensors.block_tables[0], req_indices, lookback, steps
    )
    tokens, probs, q = list[Tensor](), None, None
    for step in range(steps):
        if step:
            index = positions[step]
            rows = passes.rows(
                batch, req_indices, tokens[-1], index, index, slots[step - 1], positions[step + 1]
            )
            state = passes.step(rows, state.features, step)
        path = so_far(tokens, positions[lookback]) if sampler.has_rules else None
        logits, columns = passes.logits(state.head, step, batch, req_indices, path)
        if not sampler.all_greedy and not sampler.all_coupled:
            # All in one table, so that they need not be put together afterwards: they are the largest numbers
            # here.
            probs = logits.new_empty(logits.shape[0], steps, logits.shape[1]) if probs is None else probs
            q = probs[:, step]
        token = passes.propose(logits, req_indices, positions[step + lookback], sampler, q)
        tokens.append(token if columns is None else columns[token])
    return torch.stack(tokens, 1), probs


def so_far(tokens: list[Tensor], length: Tensor) -> tuple[Tensor, Tensor]:
    """tokens [D] of each step → the drafts before the next one [D, steps], and their number [D]."""
    return torch.stack(tokens, 1) if tokens else length.new_zeros(len(length), 0), torch.full_like(
        length, len(tokens)
    )
