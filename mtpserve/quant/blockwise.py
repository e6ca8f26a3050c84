"""Weights that the checkpoint has in float8 stay float8: `module.weight` and `module.weight_scale_inv`, see fp8.py. Others are unquantized.

With few rows the kernel widens the weights in registers, with many it quantises the activations. In plain torch each product widens its
weights, a strip at a time: slower than multiplying a widened copy (`--quantization none`), but without its memory.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mtpserve.quant.fp8 import BLOCK, dequantize_block
from mtpserve.quant.unquantized import Unquantized

STRIP = 8  # rows of blocks widened at a time


class Blockwise:
    """core.protocols.LinearMethod."""

    def __init__(self) -> None:
        self.plain = Unquantized()

    def finish(self, module: nn.Module) -> None:
        if module.weight_scale_inv is None:
            self.plain.finish(module)

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
