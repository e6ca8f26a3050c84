"""Token embedding, and the language-model head of checkpoints that tie it to the same tensor."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mtpserve.core.protocols import LinearMethod, Packed


class Embedding(nn.Module):
    def __init__(self, vocab: int, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab, hidden), requires_grad=False)
        self.bias = None
        self.packed: Packed | None = None  # a tied head multiplies this matrix

    def forward(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.weight) if self.packed is None else self.packed.rows(ids)


class TiedHead(nn.Module):
    """The language-model head of a checkpoint that has none of its own. Holds no weight: it borrows the embedding's."""

    def __init__(self, embedding: Embedding, method: LinearMethod) -> None:
        super().__init__()
        self.borrowed = [embedding]  # in a list, so that it is not registered as a child a second time
        self.method = method

    @property
    def weight(self) -> nn.Parameter:
        return self.borrowed[0].weight

    def finish_loading(self) -> None:
        self.method.finish(self.borrowed[0], lookups=True)

    def rows(self, ids: Tensor) -> Tensor:
        return self.method.rows(self.borrowed[0], ids)

    def forward(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        return self.method.apply(self.borrowed[0], x, dtype)
