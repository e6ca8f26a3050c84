"""Weights that came in float8 stay so: `module.weight` beside `module.weight_scale_inv`, see fp8.py. Others are multiplied as they are.

The kernel widens a few rows' weights in registers, and quantises many rows' activations. In plain torch each product widens its weights
anew, a strip at a time: slower than a widened copy, which is what `--quantization none` holds, but then the memory is what was asked for.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mtpserve.quant.fp8 import BLOCK, dequantize_block
from mtpserve.quant.unquantized import Unquantized

STRIP = 8  # rows of blocks that are widened at a time


class Blockwise:
    """core.protocols.LinearMethod."""

    def __init__(self) -> None:
        self.plain = Unquantized()

    def finish(self, module: nn.Module) -> None:
        if module.weight_scale_inv is None:
            self.plain.finish(module)

    def rows(self, module: nn.Module, ids: Tensor) -> Tensor:
        if module.weight_scale_inv is None:
            return self.plain.rows(module, ids)
        weight, scale = cast(Tensor, module.weight), cast(Tensor, module.weight_scale_inv)
        # Each row becomes a block of its own.
        columns = scale[ids // BLOCK[0]].repeat_interleave(BLOCK[1], 1)[:, : weight.shape[1]]
        return weight.detach()[ids].float() * columns

    def apply(self, module: nn.Module, x: Tensor) -> Tensor:
        if module.weight_scale_inv is None:
            return self.plain.apply(module, x)
        weight, scale = cast(Tensor, module.weight), cast(Tensor, module.weight_scale_inv)
        bias, kernels = cast("Tensor | None", module.bias), cast(Any, module.kernels)
        if kernels is not None:
            return cast(Tensor, kernels.linear_fp8(x, weight, scale, bias))
        strips = zip(weight.split(STRIP * BLOCK[0]), scale.split(STRIP), strict=True)
        out = torch.cat([F.linear(x, dequantize_block(*strip).to(x.dtype)) for strip in strips], -1)
        return out if bias is None else out + bias
