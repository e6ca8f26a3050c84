"""Numbers of four bits (e2m1) in groups of columns with one scale each, and how MXFP4 and NVFP4 store them.

byte        b0      b1      b2   …  b15          32 columns: the first number is in a byte's low half
numbers   n0 n1   n2 n3   n4 n5  …  n30 n31      number = VALUES[half] * scale

    MXFP4  groups of 32, scales e8m0: exponents alone (OCP Microscaling Formats 1.0), as of gpt-oss's experts
    NVFP4  groups of 16, scales e4m3, and one float32 scale for a whole matrix, which stored.py multiplies
           (https://arxiv.org/abs/2509.25149 §2)
"""

from __future__ import annotations

import torch
from torch import Tensor

MXFP4_GROUP, NVFP4_GROUP = 32, 16
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
# bytes that are looked up at a time: an index takes eight times the memory of what it is made from
STRIP = 1 << 20


def dequantize_e2m1(halves: Tensor, scale: Tensor) -> Tensor:
    """halves [..., K / 2] uint8 and scale [..., groups] of any float type → [..., K] float32. An e8m0 scale
    of 255 is NaN."""
    assert halves.dtype == torch.uint8 and halves.shape[:-1] == scale.shape[:-1], (halves.shape, scale.shape)
    values = torch.tensor(VALUES, device=halves.device)
    # [256, 2]: a byte's low half counts first
    pairs = torch.stack([values.repeat(16), values.repeat_interleave(16)], 1)
    out = torch.empty(*halves.shape, 2, device=halves.device)
    for to, chunk in zip(out.view(-1, 2).split(STRIP), halves.reshape(-1).split(STRIP), strict=True):
        torch.index_select(pairs, 0, chunk.int(), out=to)
    grouped = out.view(*scale.shape, -1)
    return grouped.mul_(scale.float().unsqueeze(-1)).flatten(-2)
