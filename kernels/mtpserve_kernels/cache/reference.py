"""What the cache kernels do, in plain torch."""

from __future__ import annotations

from torch import Tensor


def compact(pool: Tensor, source: Tensor, target: Tensor) -> None:
    """pool [layers, slots, heads, dim]; source, target [R, D] int64: in every layer slot target[r, j] becomes what source[r, j] was.

    A request's targets are distinct and its own; a pair of equal slots, or of negative ones, moves nothing.
    """
    moved = (source != target) & (source >= 0)
    pool[:, target[moved]] = pool[:, source[moved]]
