"""Drafts without a model: n-grams and predictions that are looked up, and how chains join a tree."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from mtpserve.core.batch import Drafts, Source
from mtpserve.core.spec_sizes import SpecSizes
from mtpserve.spec.draft.chain import ChainDrafter
from mtpserve.spec.draft.combined import merge
from mtpserve.spec.draft.ngram import continued, predicted

SIZES = SpecSizes(steps=1, num_proposed=1, written=1, free=2)
ZERO = torch.zeros(1, dtype=torch.int64)


def looked_up(*text: int) -> list[int]:
    tokens, count = continued(torch.tensor([text]), ZERO, torch.tensor([len(text)]), 2)
    return tokens[0, : int(count[0])].tolist()


def test_an_n_gram_does_not_begin_behind_the_end_of_the_text() -> None:
    assert looked_up(2, 5, 6, 2, 2) == [] and looked_up(2, 2, 5, 6, 2, 2) == [5, 6]


def test_a_prediction_is_proposed_from_its_beginning_and_then_from_where_the_text_is() -> None:
    prediction, size, prompt = torch.tensor([[7, 8, 9]]), torch.tensor([3]), torch.tensor([2])
    for text, expected in (([1, 2], [7, 8]), ([1, 2, 7], [8, 9]), ([1, 2, 7, 8], [9]), ([1, 7, 4], [])):
        tokens, count = predicted(prediction, size, torch.tensor([text]), torch.tensor([len(text)]), prompt, 2)
        assert tokens[0, : int(count[0])].tolist() == expected, text


def test_a_free_chain_ends_where_the_tree_is_full() -> None:
    chain = torch.tensor([[4, 5, 6, 7]]), torch.tensor([4]), Source.PREDICTION
    drafts = merge(None, 1, [chain, chain], SIZES)
    assert drafts.tokens.tolist() == [[4, 5, 6]] and drafts.num_draft_tokens.tolist() == [3] and drafts.tree is not None
    assert drafts.tree.parents.tolist() == [[0, 1, 2]]


def test_a_forced_token_is_the_grammars_though_the_model_proposed_it_too() -> None:
    base = Drafts(torch.tensor([[4]]), torch.tensor([1]))
    for source, sources in ((Source.GRAMMAR, [Source.GRAMMAR, Source.GRAMMAR]), (Source.PREDICTION, [Source.MODEL, Source.PREDICTION])):
        drafts = merge(base, 1, [(torch.tensor([[4, 5]]), torch.tensor([2]), source)], SIZES)
        assert drafts.tokens[0, :2].tolist() == [4, 5] and drafts.sources is not None and drafts.sources[0, :2].tolist() == sources


def test_a_model_s_chain_is_no_longer_than_it_made_it_where_free_drafts_may_be_deeper() -> None:
    nothing: Any = SimpleNamespace()
    passes: Any = SimpleNamespace(
        model=SimpleNamespace(features=None, lag=1),
        joined=lambda batch, hidden, verdict: hidden,
        draft_chain=lambda passes, batch, hidden, verdict, steps: (torch.ones(2, steps, dtype=torch.int64), None),
    )
    batch: Any = SimpleNamespace(draft_depth=3, num_draft_steps=torch.tensor([3, 0]), max_draft_tokens=None)
    drafts = ChainDrafter(passes, SIZES).draft(batch, nothing, nothing)
    assert drafts is not None and drafts.tokens.shape == (2, 1) and drafts.num_draft_tokens.tolist() == [1, 0]
