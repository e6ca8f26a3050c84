"""Weights as they are in the checkpoint. The kernels may pack them once into a layout of their own."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from mtpserve.core.protocols.linear import LinearKernels, Packed

HALF_TYPES = (torch.bfloat16, torch.float16)


def has_float32_product(device: torch.device) -> bool:
    """True if torch multiplies numbers of HALF_TYPES to float32 there: sums that are not rounded first,
    without a copy that widens them."""
    return device.type == "cuda"


class Unquantized:
    """core.protocols.LinearMethod: `module.weight` [outputs, inputs], which is gone where it is packed;
    `module.bias` [outputs] or None."""

    def __init__(self, kernels: LinearKernels) -> None:
        self.kernels = kernels

    def finish(self, module: nn.Module, lookups: bool = False) -> None:
        packed = self.kernels.pack(cast(Tensor, module.weight), cast("Tensor | None", module.bias), lookups)
        if packed is not None:
            del module.weight
            cast(Any, module).packed = packed

    def rows(self, module: nn.Module, ids: Tensor) -> Tensor:
        packed = cast("Packed | None", module.packed)
        return cast(Tensor, module.weight).detach()[ids] if packed is None else packed.rows(ids)

    def apply(self, module: nn.Module, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        packed = cast("Packed | None", module.packed)
        if packed is not None:
            return packed(x, dtype or x.dtype)
        weight, bias = cast(Tensor, module.weight), cast("Tensor | None", module.bias)
        if (
            dtype == torch.float32
            and bias is None
            and x.dtype == weight.dtype
            and x.dtype in HALF_TYPES
            and has_float32_product(x.device)
        ):
            return torch.mm(x, weight.t(), out_dtype=torch.float32)
        out = self.kernels.linear(x, weight, bias)
        return out if dtype is None else out.to(dtype)
