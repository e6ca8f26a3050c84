"""Verification and proposals by the Triton kernels, without synchronisation with the host."""

from __future__ import annotations

from mtpserve_kernels.spec.accept import accept
from mtpserve_kernels.spec.argmax import argmax
from mtpserve_kernels.spec.draw import draw
from torch import Tensor

from mtpserve.core.batch import Batch, Sampler, VerifyOutput
from mtpserve.spec.verify.accept import kernel_inputs
from mtpserve.spec.verify.thresholds import Thresholds


def verify(logits: Tensor, batch: Batch, depth: int, thresholds: Thresholds) -> VerifyOutput:
    assert thresholds.lossless
    cuts = batch.sampler.parameters
    tokens, accepted, path, failed = accept(
        *kernel_inputs(logits, batch, batch.input_ids, depth), sample_rows=batch.sample_rows,
        all_greedy=batch.sampler.all_greedy,
        any_top_k=cuts.any_top_k, any_top_p=cuts.any_top_p, any_min_p=cuts.any_min_p,
    )  # fmt: skip
    return VerifyOutput(tokens, accepted, None if batch.tree is None else path, failed)


def propose(logits: Tensor, req_indices: Tensor, index: Tensor, sampler: Sampler, q: Tensor | None) -> Tensor:
    """See propose.propose."""
    if sampler.all_greedy:
        return argmax(logits)
    cuts = sampler.parameters
    return draw(
        logits, req_indices, index, cuts.temperature, cuts.top_k, cuts.top_p, cuts.min_p, cuts.seed,
        None if sampler.all_coupled else cuts.coupled, q, any_top_k=cuts.any_top_k, any_top_p=cuts.any_top_p,
        any_min_p=cuts.any_min_p,
    )  # fmt: skip
