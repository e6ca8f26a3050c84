"""The kernels of layers from mtpserve_kernels.cpu: C++, one object per instruction set.

Each row's numbers depend on that row alone, whatever shares the pass: see each op's docstring. Weights are packed in place.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from mtpserve_kernels.cpu import linear
from torch import Tensor

from mtpserve.layers.kernels import Kernels
from mtpserve.layers.torch_kernels import torch_kernels


def cpu_kernels() -> Kernels:
    return replace(torch_kernels(), pack=pack)


def pack(weight: Tensor, bias: Tensor | None, lookups: bool) -> PanelMatrix:
    """core.protocols.Pack"""
    return PanelMatrix(linear.pack(weight, bias))


@dataclass(frozen=True, slots=True)
class PanelMatrix:
    """core.protocols.Packed"""

    matrix: linear.Matrix

    def __call__(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        return linear.linear(x, self.matrix, dtype)

    def rows(self, ids: Tensor) -> Tensor:
        return linear.rows(self.matrix, ids)
