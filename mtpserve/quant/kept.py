"""Weights that stay as the checkpoint has them: `module.weight`, its scales `module.weight_scale_inv` and, of
integers, its zeros `module.weight_zeros`, of NVFP4 `module.weight_global_scale`; see stored.py. Matrices
without scales are unquantized.

With few rows the kernels widen the weights in registers. With many the one for blocks of float8 quantises the
activations; other weights are widened once for all rows. In plain torch each product widens its weights:
slower than multiplying a widened copy (`--quantization none`), but without its memory.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from mtpserve.core.protocols.linear import LinearKernels
from mtpserve.quant.fp8 import BLOCK
from mtpserve.quant.stored import QuantisedMatrix, widen
from mtpserve.quant.unquantized import Unquantized


class Kept:
    """core.protocols.LinearMethod."""

    def __init__(self, kernels: LinearKernels) -> None:
        self.kernels, self.plain = kernels, Unquantized(kernels)

    def finish(self, module: nn.Module, lookups: bool = False) -> None:
        if not has_scales(module):
            self.plain.finish(module, lookups)

    def rows(self, module: nn.Module, ids: Tensor) -> Tensor:
        if not has_scales(module):
            return self.plain.rows(module, ids)
        matrix = matrix_of(module)
        if not matrix.in_blocks:
            zeros = None if matrix.zeros is None else matrix.zeros[ids]
            global_scale = None if matrix.global_scale is None else matrix.global_scale[ids]
            # Numbers of one byte cannot be indexed in every type.
            scale = matrix.scale if matrix.scale.itemsize > 1 else matrix.scale.view(torch.uint8)
            scale = scale[ids].view(matrix.scale.dtype)
            rows = QuantisedMatrix(matrix.numbers[ids], scale, zeros, global_scale=global_scale)
            return widen(rows, matrix.columns)
        # Each row becomes a block of its own.
        columns = matrix.scale[ids // BLOCK[0]].repeat_interleave(BLOCK[1], 1)[:, : matrix.columns]
        return matrix.numbers[ids].float() * columns

    def apply(self, module: nn.Module, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        if not has_scales(module):
            return self.plain.apply(module, x, dtype)
        matrix = matrix_of(module)
        more = matrix.zeros, matrix.global_scale, cast("Tensor | None", module.bias)
        out = self.kernels.linear_stored(x, matrix.numbers, matrix.scale, *more)
        return out if dtype is None else out.to(dtype)


def has_scales(module: nn.Module) -> bool:
    """An embedding whose matrix is also the head never has."""
    return getattr(module, "weight_scale_inv", None) is not None


def matrix_of(module: nn.Module) -> QuantisedMatrix:
    numbers, scale = cast(Tensor, module.weight).detach(), cast(Tensor, module.weight_scale_inv)
    zeros, global_scale = (
        cast("Tensor | None", tensor) for tensor in (module.weight_zeros, module.weight_global_scale)
    )
    return QuantisedMatrix(numbers, scale, zeros, global_scale=global_scale)
