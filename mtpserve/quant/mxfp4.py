"""MXFP4: numbers of four bits (e2m1) in groups of 32 with one exponent each, as gpt-oss stores its experts
(OCP Microscaling Formats 1.0).

byte        b0      b1      b2   …  b15          a group of 32: the first number is in a byte's low half
numbers   n0 n1   n2 n3   n4 n5  …  n30 n31      number = VALUES[half] * 2 ** (scale - 127)
"""

from __future__ import annotations

import torch
from torch import Tensor

GROUP = 32
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
# bytes that are looked up at a time: an index takes eight times the memory of what it is made from
STRIP = 1 << 20


def dequantize_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """blocks [..., groups, 16] and scales [..., groups], uint8 → [..., groups * 32] float32. A scale of 255
    is NaN."""
    assert blocks.shape == (*scales.shape, GROUP // 2) and blocks.dtype == scales.dtype == torch.uint8, (
        blocks.shape,
        scales.shape,
    )
    values = torch.tensor(VALUES, device=blocks.device)
    # [256, 2]: a byte's low half counts first
    pairs = torch.stack([values.repeat(16), values.repeat_interleave(16)], 1)
    out = torch.empty(*blocks.shape, 2, device=blocks.device)
    for to, chunk in zip(out.view(-1, 2).split(STRIP), blocks.reshape(-1).split(STRIP), strict=True):
        torch.index_select(pairs, 0, chunk.int(), out=to)
    exponents = scales.contiguous().view(torch.float8_e8m0fnu).float()
    return out.flatten(-2).mul_(exponents.unsqueeze(-1)).flatten(-2)
