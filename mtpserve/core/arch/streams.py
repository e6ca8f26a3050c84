"""The dimensions of a model's residual streams."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StreamsArch:
    """Manifold-constrained hyper-connections (https://arxiv.org/abs/2512.24880): instead of one residual
    stream there are `number`, which each layer mixes by a matrix that `iterations` of Sinkhorn's make doubly
    stochastic."""

    number: int
    iterations: int
    eps: float
