"""Drafts without a model: the tokens that followed the last occurrence of the current n-gram (prompt lookup
decoding, https://github.com/apoorvumang/prompt-lookup-decoding), in the request's own text or in the client's
prediction of the output.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mtpserve.core.arch.model import Features
from mtpserve.core.batch import Batch, Drafts, Hidden, Source, VerifyOutput
from mtpserve.core.spec_sizes import SpecSizes

LONGEST = 4  # tokens of the longest n-gram; shorter ones are used if it does not occur
SHORTEST = 2


class NGramDrafter:
    """core.protocols.Drafter without a draft model."""

    features, lag = Features(), None
    coupled = True
    graph_safe = False  # it searches as many columns as the longest request has tokens

    def __init__(self, sizes: SpecSizes) -> None:
        self.sizes = sizes

    def draft(self, batch: Batch, hidden: Hidden, verify_output: VerifyOutput) -> Drafts | None:
        if batch.draft_depth == 0:
            return None
        assert batch.num_draft_steps is not None
        req_indices = batch.drafted(batch.req_indices)
        tokens, count = continued(
            batch.req_tensors.tokens,
            req_indices,
            batch.req_tensors.num_tokens[req_indices],
            min(batch.draft_depth, self.sizes.steps),
        )
        count = torch.minimum(count, batch.num_draft_steps)
        count = count if batch.max_draft_tokens is None else torch.minimum(count, batch.max_draft_tokens)
        return Drafts(tokens, count, sources=torch.full_like(tokens, Source.NGRAM))

    def store_deferred_kv(self, batch: Batch) -> None:
        """There is no draft model."""


def continued(tokens: Tensor, req_indices: Tensor, length: Tensor, number: int) -> tuple[Tensor, Tensor]:
    """tokens [seats, n], length [D] → proposals [D, number], and how many of them are valid [D]."""
    longest = int(length.max())
    history = tokens[req_indices, :longest]
    ends = last_of(history, length, LONGEST)
    # The end of the text itself is not an earlier occurrence.
    position = follow(history, length - 1, ends, length)
    return gather_tokens(history, position, length, number)


def predicted(
    prediction: Tensor, size: Tensor, tokens: Tensor, length: Tensor, prompt: Tensor, number: int
) -> tuple[Tensor, Tensor]:
    """The same from the client's prediction: prediction [D, n], of which `size` [D] are valid; tokens [D, m],
    of which `length` [D].

    While there is no output to look up, the beginning of the prediction is proposed.
    """
    num_output_tokens = length - prompt
    position = follow(
        prediction, size, last_of(tokens, length, LONGEST), num_output_tokens, shortest=1, first=True
    )
    position = torch.where(num_output_tokens == 0, 0, position)
    return gather_tokens(prediction, position, size, number)


def last_of(tokens: Tensor, length: Tensor, number: int) -> Tensor:
    """tokens [D, n] → the last `number` before `length` [D]; -1 for those before the beginning."""
    position = length.unsqueeze(1) - number + torch.arange(number, device=length.device)
    return tokens.gather(1, position.clamp(min=0)).masked_fill(position < 0, -1)


def follow(
    text: Tensor,
    size: Tensor,
    ends: Tensor,
    num_output_tokens: Tensor,
    shortest: int = SHORTEST,
    first: bool = False,
) -> Tensor:
    """text [D, n], ends [D, LONGEST] → the place [D] after the last occurrence (or the first) of the longest
    suffix of `ends` that occurs; -1 if none does. At most `num_output_tokens` [D] tokens are compared.

        ends     . . b c            text   a b c d e b c f              place of f, or of d with `first`
    """
    device = text.device
    columns = torch.arange(text.shape[1], device=device)
    # [D, n], the last `back` tokens up to column c are those of `ends`
    agree = torch.ones_like(text, dtype=torch.bool)
    after = size.new_full(size.shape, -1)
    for back in range(1, LONGEST + 1):
        shifted = torch.roll(text, back - 1, 1) == ends[:, -back].unsqueeze(1)
        agree = agree & shifted & (columns >= back - 1)
        if back < shortest:
            continue
        good = agree & (columns < size.unsqueeze(1)) & (num_output_tokens >= back).unsqueeze(1)
        position = torch.where(good, columns + 1, text.shape[1] + 1 if first else -1)
        best = position.amin(1) if first else position.amax(1)
        after = torch.where(good.any(1), best, after)
    return after


def gather_tokens(text: Tensor, position: Tensor, size: Tensor, number: int) -> tuple[Tensor, Tensor]:
    """text [D, n] from `position` [D] on (-1: nothing) → [D, number], count [D]"""
    if text.shape[1] == 0:
        return text.new_zeros(len(text), number), torch.zeros_like(size)
    index = position.clamp(min=0).unsqueeze(1) + torch.arange(number, device=text.device)
    count = torch.where(position < 0, 0, size - position).clamp(0, number)
    return text.gather(1, index.clamp(max=text.shape[1] - 1)), count
