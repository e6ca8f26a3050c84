"""Token embedding and language-model head, whose rows the ranks of a model share: each has a block of the
vocabulary's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mtpserve.core.protocols.linear import LinearMethod, Packed
from mtpserve.core.protocols.parallel import ALONE, Ranks, share
from mtpserve.layers.linear import Linear


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """`tokens` in as many equal blocks as there are ranks; the last one ends with rows that mean nothing,
    where they do not divide."""

    tokens: int
    ranks: Ranks

    @property
    def rows(self) -> int:
        """The rows of each rank."""
        return share(self.tokens, self.ranks.size)

    @property
    def first(self) -> int:
        """The rank's first token."""
        return self.ranks.rank * self.rows

    def lookup(self, rows: Callable[[Tensor], Tensor], ids: Tensor) -> Tensor:
        """`rows`: from places in the rank's block to rows. ids [T] → [T, hidden] from whoever has them."""
        if self.ranks.size == 1:
            return rows(ids)
        places = ids - self.first
        elsewhere = (places < 0) | (places >= self.rows)
        return self.ranks.sum(rows(places.masked_fill(elsewhere, 0)).masked_fill(elsewhere.unsqueeze(-1), 0))

    def side_by_side(self, logits: Tensor) -> Tensor:
        """[T, rows] of each rank → [T, tokens]"""
        full_logits = self.ranks.gather(logits)
        return (
            full_logits
            if full_logits.shape[-1] == self.tokens
            else full_logits[..., : self.tokens].contiguous()
        )


class Embedding(nn.Module):
    shared_tokens = True  # among ranks, see weights/shards.py

    def __init__(self, vocab: int, hidden: int, ranks: Ranks = ALONE, scale: float | None = None) -> None:
        """`scale`: what rows are multiplied with, rounded to their type; None: nothing."""
        super().__init__()
        self.vocabulary, self.scale = Vocabulary(vocab, ranks), scale
        self.weight = nn.Parameter(torch.empty(self.vocabulary.rows, hidden), requires_grad=False)
        self.bias = None
        self.packed: Packed | None = None  # a tied head multiplies this matrix

    def forward(self, ids: Tensor) -> Tensor:
        rows = self.vocabulary.lookup(self.own_rows, ids)
        return rows if self.scale is None else rows * rounded(self.scale, rows.dtype)

    @property
    def table(self) -> Tensor | None:
        """[vocabulary, hidden], where rows are looked up in it as it was loaded."""
        is_whole = self.packed is None and self.vocabulary.ranks.size == 1
        return self.weight if is_whole and self.scale is None else None

    def own_rows(self, places: Tensor) -> Tensor:
        return F.embedding(places, self.weight) if self.packed is None else self.packed.rows(places)


@cache
def rounded(number: float, dtype: torch.dtype) -> float:
    """Returns the number that published models multiply with: it has their type."""
    return torch.tensor(number, dtype=dtype, device="cpu").item()


def capped(logits: Tensor, cap: float | None) -> Tensor:
    """Soft capping (https://arxiv.org/abs/2408.00118 §2): cap * tanh(logits / cap)."""
    return logits if cap is None else (logits / cap).tanh() * cap


class VocabularyHead(Linear):
    """The language-model head: [T, hidden] → [T, vocabulary]."""

    shared_tokens = True

    def __init__(self, hidden: int, vocab: int, method: LinearMethod, ranks: Ranks = ALONE) -> None:
        self.vocabulary = Vocabulary(vocab, ranks)
        super().__init__(hidden, (self.vocabulary.rows,), method)

    def rows(self, ids: Tensor) -> Tensor:
        return self.vocabulary.lookup(super().rows, ids)

    def forward(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        return self.vocabulary.side_by_side(super().forward(x, dtype))


class TiedHead(nn.Module):
    """The language-model head of a checkpoint that has none of its own. Holds no weight: it borrows the
    embedding's."""

    def __init__(self, embedding: Embedding, method: LinearMethod) -> None:
        super().__init__()
        self.borrowed = [embedding]  # in a list, so that it is not registered as a child a second time
        self.method, self.vocabulary = method, embedding.vocabulary

    @property
    def weight(self) -> nn.Parameter:
        return self.borrowed[0].weight

    def finish_loading(self) -> None:
        self.method.finish(self.borrowed[0], lookups=True)

    def rows(self, ids: Tensor) -> Tensor:
        return self.vocabulary.lookup(lambda places: self.method.rows(self.borrowed[0], places), ids)

    def forward(self, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        return self.vocabulary.side_by_side(self.method.apply(self.borrowed[0], x, dtype))


def head_of_tokens(
    head: VocabularyHead | TiedHead, tokens: Tensor, hidden: int, dtype: torch.dtype, method: LinearMethod
) -> VocabularyHead:
    """A head of these tokens [n] alone, with a copy of the rows of `head`."""
    subset_head = VocabularyHead(hidden, len(tokens), method, head.vocabulary.ranks)
    shard, rows = subset_head.vocabulary, head.rows(tokens).to(dtype)
    mine = rows[shard.first : shard.first + shard.rows]
    subset_head.weight = nn.Parameter(F.pad(mine, (0, 0, 0, shard.rows - len(mine))), requires_grad=False)
    subset_head.finish_loading()
    return subset_head
