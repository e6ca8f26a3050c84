"""A short causal convolution inside blocks of rows, by kernels of which a part is computed from the rows
(DFlash2, z-lab/dflash)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mtpserve.core.protocols.linear import LinearMethod
from mtpserve.layers.linear import Linear


class BlockConvolution(nn.Module):
    """Two convolutions around a sublayer, each a sum over taps i of (base[i] + made[i]) * the row i before,
    nothing before a block's first row. `coeffs`, from the sublayer's input, has a number for each `group` of
    the hidden ones. In plain torch on every device."""

    def __init__(self, hidden: int, taps: int, group: int, method: LinearMethod) -> None:
        super().__init__()
        self.group = group
        self.base = nn.Parameter(torch.empty(2, taps, hidden), requires_grad=False)
        self.kernel = Linear(hidden, (2 * taps * (hidden // group),), method)

    def before(self, x: Tensor, block: int) -> tuple[Tensor, Tensor]:
        """x [blocks * block, hidden] → the same convolved, and what `after` needs for the sublayer's
        output."""
        coeffs = self.kernel(x).unflatten(-1, (2, self.base.shape[1], -1))
        return self.convolved(x, self.base[0], coeffs[:, 0], block), coeffs[:, 1]

    def after(self, x: Tensor, coeffs: Tensor, block: int) -> Tensor:
        return self.convolved(x, self.base[1], coeffs, block)

    def convolved(self, x: Tensor, base: Tensor, coeffs: Tensor, block: int) -> Tensor:
        """base [taps, hidden], coeffs [rows, taps, groups]"""
        rows, out = x.unflatten(0, (-1, block)), torch.zeros_like(x)
        for tap in range(len(base)):
            shifted = F.pad(rows, (0, 0, tap, 0))[:, :block].flatten(0, 1)
            out = out + (base[tap] + coeffs[:, tap].repeat_interleave(self.group, -1)) * shifted
        return out
