"""Root-mean-square normalisation (https://arxiv.org/abs/1910.07467), computed in float32 as the published
models do."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from mtpserve.layers.kernels import Kernels


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float, kernels: Kernels) -> None:
        super().__init__()
        self.eps, self.kernels = eps, kernels
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.kernels.add_rms_norm(x, None, self.weight, self.eps)[0]

    def add(self, x: Tensor, residual: Any) -> tuple[Tensor, Any]:
        """→ the norm of the sum, and the sum. residual: a tensor or None; layers with several streams have
        another (layers/streams)."""
        return self.kernels.add_rms_norm(x, residual, self.weight, self.eps)
