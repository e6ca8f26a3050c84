"""A hidden state and the next token's embedding, fused into the input of one more decoder layer."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from mtpserve.core.protocols import LinearMethod
from mtpserve.layers.kernels import Kernels
from mtpserve.layers.linear import Linear
from mtpserve.layers.norm import RMSNorm


class Fusion(nn.Module):
    """project([norm(embedding); norm(hidden)]), or the two halves the other way round: families differ.

    DeepSeek's paper writes [hidden; embedding], its released eh_proj is [embedding; hidden].
    """

    def __init__(
        self, hidden: int, eps: float, order: Literal["embedding-hidden", "hidden-embedding"], method: LinearMethod, kernels: Kernels
    ) -> None:
        super().__init__()
        self.embedding_norm, self.hidden_norm = RMSNorm(hidden, eps, kernels), RMSNorm(hidden, eps, kernels)
        self.project = Linear(2 * hidden, (hidden,), method)
        self.embedding_first = order == "embedding-hidden"

    def forward(self, embedding: Tensor, hidden: Tensor) -> Tensor:
        halves = self.embedding_norm(embedding), self.hidden_norm(hidden)
        return self.project(torch.cat(halves if self.embedding_first else halves[::-1], -1))  # type: ignore[no-any-return]
