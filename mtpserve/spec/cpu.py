"""Verification by the kernel for CPUs: one call, which reads only the rows of nodes that decide something."""

from __future__ import annotations

from mtpserve_kernels.cpu.accept import accept
from torch import Tensor

from mtpserve.core.batch import Batch
from mtpserve.spec.accept import Decision, kernel_inputs
from mtpserve.spec.thresholds import Thresholds


def decide(logits: Tensor, batch: Batch, depth: int, thresholds: Thresholds) -> Decision:
    assert thresholds.lossless
    tokens, accepted, path, failed = accept(*kernel_inputs(logits, batch, depth))
    return Decision(tokens, accepted, None if batch.tree is None else path, failed)
