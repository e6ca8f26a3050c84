"""Verification and proposals by the kernels for CPUs, each in one call. Verification reads only the rows of nodes that decide something;
a proposal reads its row once for the largest and, if it is drawn, twice more."""

from __future__ import annotations

from mtpserve_kernels.cpu.accept import accept, argmax, draw
from torch import Tensor

from mtpserve.core.batch import Batch
from mtpserve.core.protocols import Sampler
from mtpserve.spec.accept import Decision, kernel_inputs
from mtpserve.spec.thresholds import Thresholds


def decide(logits: Tensor, batch: Batch, depth: int, thresholds: Thresholds) -> Decision:
    assert thresholds.lossless
    tokens, accepted, path, failed = accept(*kernel_inputs(logits, batch, depth))
    return Decision(tokens, accepted, None if batch.tree is None else path, failed)


def propose(logits: Tensor, seat_ids: Tensor, index: Tensor, sampler: Sampler, q: Tensor | None) -> Tensor:
    """See propose.propose."""
    if sampler.all_greedy:
        return argmax(logits)
    cuts = sampler.parameters
    return draw(
        logits, seat_ids, index, cuts.temperature, cuts.top_k, cuts.top_p, cuts.min_p, cuts.seed,
        None if sampler.all_coupled else cuts.coupled, q,
    )  # fmt: skip
