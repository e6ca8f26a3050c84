"""Verification by the Triton kernels: two launches, without synchronisation with the host."""

from __future__ import annotations

from mtpserve_kernels.spec.accept import accept
from torch import Tensor

from mtpserve.core.batch import Batch
from mtpserve.spec.accept import Decision, kernel_inputs
from mtpserve.spec.thresholds import Thresholds


def decide(logits: Tensor, batch: Batch, depth: int, thresholds: Thresholds) -> Decision:
    assert thresholds.lossless
    cuts = batch.sampler.parameters
    tokens, accepted, path, failed = accept(
        *kernel_inputs(logits, batch, depth), any_top_k=cuts.any_top_k, any_top_p=cuts.any_top_p, any_min_p=cuts.any_min_p
    )
    return Decision(tokens, accepted, None if batch.tree is None else path, failed)
