"""Weights made int8 while they are loaded, with one scale for each output; a product quantises its inputs,
each row with a scale of its own (W8A8, as in https://arxiv.org/abs/2211.10438 without smoothing)."""

from __future__ import annotations

from collections import deque
from typing import Any, cast

import torch
from mtpserve_kernels.quant.reference import quantize_int8
from torch import Tensor, nn

from mtpserve.core.protocols.linear import LinearKernels, Packed

# numbers that are widened at a time: a whole matrix in float32, several times, would be the largest thing in
# memory
NUMBERS = 1 << 20


class Int8:
    """core.protocols.LinearMethod"""

    def __init__(self, kernels: LinearKernels) -> None:
        self.kernels = kernels
        # for each matrix, the norm of the rounding error over the norm of the matrix
        self.errors = deque[float](maxlen=4096)

    def finish(self, module: nn.Module, lookups: bool = False) -> None:
        exact = cast(Tensor, module.weight).detach()
        weight, scale = torch.empty_like(exact, dtype=torch.int8), torch.empty(len(exact))
        changed, total = 0.0, 0.0  # squares of lengths
        strip = max(1, NUMBERS // exact.shape[1])
        for chunk, to, by in zip(exact.split(strip), weight.split(strip), scale.split(strip), strict=True):
            wide = chunk.float()
            rounded, row_scale = quantize_int8(wide)
            to.copy_(rounded)
            by.copy_(row_scale)
            total += float(wide.square().sum())
            # Not in place: numbers that are float32 already are the weight's own, and somebody else's as well
            # where a head is copied.
            changed += float((wide - rounded * row_scale.unsqueeze(1)).square_().sum())
        self.errors.append((changed / max(total, 1e-60)) ** 0.5)
        packed = self.kernels.pack_int8(weight, scale, cast("Tensor | None", module.bias))
        del module.weight
        cast(Any, module).packed = packed

    def rows(self, module: nn.Module, ids: Tensor) -> Tensor:
        return cast(Packed, module.packed).rows(ids)

    def apply(self, module: nn.Module, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        return cast(Packed, module.packed)(x, dtype or x.dtype)
