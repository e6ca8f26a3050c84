"""Root-mean-square normalisation (https://arxiv.org/abs/1910.07467), computed in float32 as the published models do."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mtpserve.layers.kernels import Kernels


class RMSNorm(nn.Module):
    kernels: Kernels | None = None

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.size, self.eps = (size,), eps
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.kernels is not None:
            return self.kernels.add_rms_norm(x, None, self.weight, self.eps)[0]
        return F.rms_norm(x, self.size, self.weight, self.eps)

    def add(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """→ the norm of the sum, and the sum."""
        if self.kernels is not None:
            return self.kernels.add_rms_norm(x, residual, self.weight, self.eps)
        total = x if residual is None else residual + x
        return F.rms_norm(total, self.size, self.weight, self.eps), total
