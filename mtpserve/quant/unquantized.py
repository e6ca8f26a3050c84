"""Weights as they are in the checkpoint. The kernels may pack them once into a layout of their own."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from mtpserve.core.protocols import LinearKernels, Packed


class Unquantized:
    """core.protocols.LinearMethod: `module.weight` [outputs, inputs], which is gone where it is packed; `module.bias` [outputs] or None."""

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
        if packed is None:
            out = self.kernels.linear(x, cast(Tensor, module.weight), cast("Tensor | None", module.bias))
            return out if dtype is None else out.to(dtype)
        return packed(x, dtype or x.dtype)
