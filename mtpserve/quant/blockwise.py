"""Weights that the checkpoint has in float8 stay float8: `module.weight` and `module.weight_scale_inv`, see fp8.py. Others are unquantized.

With few rows the kernel widens the weights in registers, with many it quantises the activations. In plain torch each product widens its
weights: slower than multiplying a widened copy (`--quantization none`), but without its memory.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from mtpserve.core.protocols import LinearKernels
from mtpserve.quant.fp8 import BLOCK
from mtpserve.quant.unquantized import Unquantized


class Blockwise:
    """core.protocols.LinearMethod."""

    def __init__(self, kernels: LinearKernels) -> None:
        self.kernels, self.plain = kernels, Unquantized(kernels)

    def finish(self, module: nn.Module, lookups: bool = False) -> None:
        if module.weight_scale_inv is None:
            self.plain.finish(module, lookups)

    def rows(self, module: nn.Module, ids: Tensor) -> Tensor:
        if module.weight_scale_inv is None:
            return self.plain.rows(module, ids)
        weight, scale = cast(Tensor, module.weight), cast(Tensor, module.weight_scale_inv)
        # Each row becomes a block of its own.
        columns = scale[ids // BLOCK[0]].repeat_interleave(BLOCK[1], 1)[:, : weight.shape[1]]
        return weight.detach()[ids].float() * columns

    def apply(self, module: nn.Module, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        if module.weight_scale_inv is None:
            return self.plain.apply(module, x, dtype)
        weight, scale = cast(Tensor, module.weight), cast(Tensor, module.weight_scale_inv)
        out = self.kernels.linear_fp8(x, weight, scale, cast("Tensor | None", module.bias))
        return out if dtype is None else out.to(dtype)
