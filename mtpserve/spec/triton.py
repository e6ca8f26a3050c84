"""Verification by the Triton kernels: two launches, without synchronisation with the host."""

from __future__ import annotations

from mtpserve_kernels.spec.accept import accept
from torch import Tensor

from mtpserve.core.batch import Batch
from mtpserve.spec.accept import Decision
from mtpserve.spec.thresholds import Thresholds


def decide(logits: Tensor, batch: Batch, depth: int, thresholds: Thresholds) -> Decision:
    assert thresholds.lossless
    seats, sampler, tree = batch.seats, batch.sampler, batch.tree
    cuts = sampler.parameters
    tokens, accepted, path, failed = accept(
        logits.contiguous(), batch.drafts, batch.draft_count, None if tree is None else tree.parents, None if tree is None else tree.depths,
        batch.seat_ids, seats.length, cuts.temperature, cuts.top_k, cuts.top_p, cuts.min_p, cuts.seed, cuts.coupled,
        None if sampler.all_coupled or sampler.all_greedy else seats.draft_probs, depth,
        any_top_k=cuts.any_top_k, any_top_p=cuts.any_top_p, any_min_p=cuts.any_min_p,
    )  # fmt: skip
    return Decision(tokens, accepted, None if tree is None else path, failed)
