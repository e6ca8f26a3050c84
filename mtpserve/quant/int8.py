"""Weights made int8 while they are loaded, with one scale for each output; a product quantises its inputs, each row with a scale of its own
(W8A8, as in https://arxiv.org/abs/2211.10438 without smoothing)."""

from __future__ import annotations

import logging
from typing import Any, cast

import torch
from torch import Tensor, nn

from mtpserve.core.protocols import LinearKernels, Packed

log = logging.getLogger(__name__)


class Int8:
    """core.protocols.LinearMethod"""

    def __init__(self, kernels: LinearKernels) -> None:
        self.kernels = kernels

    def finish(self, module: nn.Module, lookups: bool = False) -> None:
        packed = self.kernels.pack_int8(cast(Tensor, module.weight), cast("Tensor | None", module.bias), lookups)
        del module.weight
        cast(Any, module).packed = packed

    def rows(self, module: nn.Module, ids: Tensor) -> Tensor:
        return cast(Packed, module.packed).rows(ids)

    def apply(self, module: nn.Module, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        return cast(Packed, module.packed)(x, dtype or x.dtype)
