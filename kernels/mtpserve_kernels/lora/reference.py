"""What the kernels of low-rank adapters compute, in plain torch (LoRA, https://arxiv.org/abs/2106.09685).

    y[t] += B[a] (A[a] x[t])        a = the adapter of row t; a row without one stays as it is, to the last bit

The adapters of one layer are two tensors with a slot for each, so that their addresses never change. Ranks are filled up with zeros
to R, and what B is scaled with is in B. Where several matrices are fused along the outputs (q, k, v) each has an A and its own rows:

    a  [slots, parts R, K]          the As of all parts
    b  [slots, R, N]                the Bs, inputs first; output n belongs to one part, whose R numbers it takes
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class RowAdapters(NamedTuple):
    """Which adapter each row of a pass has."""

    slots: Tensor  # [T] int64, -1: none
    order: Tensor  # [T] int64, the rows grouped by adapter, those without one first


def row_adapters(slots: Tensor) -> RowAdapters:
    return RowAdapters(slots, slots.argsort(stable=True))


def check(x: Tensor, y: Tensor, a: Tensor, b: Tensor, parts: Sequence[int]) -> int:
    """→ the rank R."""
    rank = b.shape[1]
    assert x.shape == (len(y), a.shape[2]) and a.shape[:2] == (len(b), len(parts) * rank), (x.shape, y.shape, a.shape, b.shape)
    assert y.shape[1] == b.shape[2] == sum(parts) and y.is_contiguous() and x.stride(1) == 1, (y.shape, b.shape, parts)
    assert a.dtype == b.dtype == x.dtype, (a.dtype, b.dtype, x.dtype)
    return rank


def add_lora(x: Tensor, y: Tensor, adapters: RowAdapters, a: Tensor, b: Tensor, parts: Sequence[int]) -> Tensor:
    """x [T, K]; y [T, N] of x's type or float32, changed in place and returned; `parts`: their numbers of outputs, N in all.

    Sums are float32; the products with A are rounded to x's type, as PEFT has them.
    """
    rank = check(x, y, a, b, parts)
    for slot in adapters.slots.unique().tolist():
        if slot < 0:
            continue
        rows = (adapters.slots == slot).nonzero().squeeze(1)
        low = (x[rows].float() @ a[slot].float().T).to(x.dtype).float().split(rank, 1)
        products = [low_part @ up for low_part, up in zip(low, b[slot].float().split(list(parts), 1), strict=True)]
        y[rows] = (y[rows].float() + torch.cat(products, 1)).to(y.dtype)
    return y
