"""A draft head over the most frequent tokens: drafting multiplies only their rows of the language-model head.

Other tokens are never proposed and their q is zero. Verification uses the whole vocabulary, so it stays lossless.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class ReducedHead:
    tokens: Tensor  # [n] int64, ascending, so that ties are broken as in the whole vocabulary
    vocab: int
    multiply: Callable[[Tensor], Tensor]  # [rows, hidden] → [rows, n] float32

    def spread(self, logits: Tensor) -> Tensor:
        """[rows, n] → [rows, vocabulary]; -inf for tokens that are not in the map."""
        return logits.new_full((len(logits), self.vocab), -torch.inf).index_copy(1, self.tokens, logits)
