"""A hidden state and the next token's embedding, fused into the input of one more decoder layer."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from mtpserve.core.arch.model import ModelArch
from mtpserve.core.protocols.linear import LinearMethod
from mtpserve.layers.kernels import Kernels
from mtpserve.layers.linear import Linear
from mtpserve.layers.norm import RMSNorm


class Fusion(nn.Module):
    """project([norm(embedding); norm(hidden)]), or the two halves the other way round: families differ.

    DeepSeek's paper writes [hidden; embedding], its released eh_proj is [embedding; hidden].
    """

    def __init__(
        self,
        hidden: int,
        eps: float,
        order: Literal["embedding-hidden", "hidden-embedding"],
        method: LinearMethod,
        kernels: Kernels,
    ) -> None:
        super().__init__()
        self.embedding_norm, self.hidden_norm = RMSNorm(hidden, eps, kernels), RMSNorm(hidden, eps, kernels)
        self.project = Linear(2 * hidden, (hidden,), method)
        self.embedding_first = order == "embedding-hidden"

    def forward(self, embedding: Tensor, hidden: Tensor) -> Tensor:
        halves = self.embedding_norm(embedding), self.hidden_norm(hidden)
        pair = halves if self.embedding_first else halves[::-1]
        return self.project(torch.cat(pair, -1))  # type: ignore[no-any-return]


class StreamFusion(nn.Module):
    """Fuses several residual streams: project(norm(stream)) of each, plus project(norm(embedding)) for
    all."""

    def __init__(self, arch: ModelArch, method: LinearMethod, kernels: Kernels) -> None:
        super().__init__()
        self.hidden = arch.hidden
        self.embedding_norm, self.hidden_norm = (
            RMSNorm(arch.hidden, arch.norm_eps, kernels) for _ in range(2)
        )
        self.embedding, self.stream = (Linear(arch.hidden, (arch.hidden,), method) for _ in range(2))

    def forward(self, embedding: Tensor, hidden: Tensor) -> Tensor:
        """embedding [T, hidden], hidden [T, streams * hidden] → the same"""
        streams = hidden.reshape(-1, self.hidden)
        projected = self.stream(self.hidden_norm(streams)).view(len(hidden), -1, self.hidden)
        embedded = self.embedding(self.embedding_norm(embedding)).unsqueeze(1)
        return (projected + embedded).flatten(1)  # type: ignore[no-any-return]
