"""Token embedding, and the language-model head of checkpoints that tie it to the same tensor."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Embedding(nn.Module):
    def __init__(self, vocab: int, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab, hidden), requires_grad=False)

    def forward(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.weight)


class TiedHead(nn.Module):
    """The language-model head of a checkpoint that has none of its own. Holds no weight: it borrows the embedding's."""

    def __init__(self, embedding: Embedding) -> None:
        super().__init__()
        self.borrowed = [embedding]  # in a list, so that it is not registered as a child a second time

    def rows(self, ids: Tensor) -> Tensor:
        return self.borrowed[0].weight.detach()[ids]

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.borrowed[0].weight)
