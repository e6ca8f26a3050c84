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


class RowNorms(nn.Module):
    """The norms of queries and of keys over all heads of a row. Each of several ranks has some heads; they
    share the sums of squares. The ranks' parts are of one size, and each key head is on as many ranks."""

    def __init__(self, q: int, k: int, eps: float, kernels: Kernels) -> None:
        """q, k: numbers of all heads here."""
        super().__init__()
        self.eps, self.kernels = eps, kernels
        self.q = nn.Parameter(torch.empty(q), requires_grad=False)
        self.k = nn.Parameter(torch.empty(k), requires_grad=False)

    def forward(self, qkv: Tensor) -> Tensor:
        """qkv [T, q + k + v] → the same with q and k normed."""
        ranks, sizes = self.kernels.ranks, [len(self.q), len(self.k)]
        *parts, values = qkv.split([*sizes, qkv.shape[-1] - sum(sizes)], -1)
        wide = [part.float() for part in parts]
        squares = ranks.sum(torch.stack([part.square().mean(-1) for part in wide])) / ranks.size
        scales = (squares + self.eps).rsqrt().unsqueeze(-1)
        normed = [
            (part * scale).to(qkv.dtype) * weight
            for part, scale, weight in zip(wide, scales, (self.q, self.k), strict=True)
        ]
        return torch.cat([*normed, values], -1)
