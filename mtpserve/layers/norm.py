"""Root-mean-square normalisation (https://arxiv.org/abs/1910.07467), computed in float32 as the published models do."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.size, self.eps = (size,), eps
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.size, self.weight, self.eps)
