"""Accepted paths of trees become contiguous: their slots are moved, in every layer, in place.

A program has a piece of one request's slots in one layer and walks the path from the root: a node's place on the path is never after
the node itself, so that what is overwritten has already been moved. Moves 2 D numbers per layer and slot.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit(do_not_specialize=["depth"])
def compact_kernel(p_pool, p_source, p_target, depth, stride_layer, stride_slot, SIZE: tl.constexpr, B: tl.constexpr):
    i_layer, r, i_piece = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    o = i_piece * B + tl.arange(0, B)
    m = o < SIZE
    for j in range(depth):
        source, target = tl.load(p_source + r * depth + j), tl.load(p_target + r * depth + j)
        if (source != target) & (source >= 0):
            p_layer = p_pool + i_layer * stride_layer
            b = tl.load(p_layer + source * stride_slot + o, mask=m)
            tl.store(p_layer + target * stride_slot + o, b, mask=m)


def compact(pool: Tensor, source: Tensor, target: Tensor) -> None:
    """See reference.compact; along a request's row, targets come before what is still to be read: source[r, j] ≥ target[r, j], and
    target[r, j] is no later source."""
    layers, _, heads, dim = pool.shape
    assert source.shape == target.shape and source.is_contiguous() and target.is_contiguous(), (source.shape, target.shape)
    assert pool.stride(3) == 1 and pool.stride(2) == dim
    requests, depth = source.shape
    size = heads * dim
    words = pool if pool.element_size() > 1 else pool.view(torch.uint8)
    if requests and depth:
        block = min(1024, triton.next_power_of_2(size))
        compact_kernel[(layers, requests, triton.cdiv(size, block))](
            words, source, target, depth, pool.stride(0), pool.stride(1), SIZE=size, B=block, num_warps=2
        )
