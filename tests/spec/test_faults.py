"""Numbers that went bad: in the target they end one request, in the draft head they cost acceptance and nothing else."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mtpserve.core.request import Request
from mtpserve.core.sampling import SamplingParams
from mtpserve.core.sequence import Finish
from tests.tiny import prompts, run, tiny_engine, tiny_model

GREEDY = SamplingParams(max_tokens=20, temperature=0)
POISON = 13  # a token whose rows go bad


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("params", [GREEDY, SamplingParams(max_tokens=20, temperature=0.9, seed=3)])
def test_a_bad_row_ends_its_request_alone(monkeypatch: pytest.MonkeyPatch, bad: float, params: SamplingParams) -> None:
    model = tiny_model()
    asked = [[t for t in prompt if t != POISON] + [1] for prompt in prompts(5)]
    clean = run(tiny_engine(model, 3), asked, params)
    asked[2] = [*asked[2], POISON]
    healthy = model.trunk

    def trunk(ids: torch.Tensor, *rest: Any) -> Any:
        hidden = healthy(ids, *rest)
        hidden.head[ids == POISON] = bad
        return hidden

    monkeypatch.setattr(model, "trunk", trunk)
    engine = tiny_engine(model, 3)
    for i, prompt in enumerate(asked):
        engine.add(Request(str(i), prompt, params))
    tokens: dict[str, list[int]] = {str(i): [] for i in range(5)}
    met: set[str] = set()  # neighbours that came upon the poisoned token by themselves, if only as a draft
    ended = {}
    while engine.has_work:
        for event in engine.step():
            tokens[event.id] += event.tokens
            if POISON in event.tokens + event.proposal.tokens:
                met.add(event.id)
            if event.finish is not None:
                ended[event.id] = event
    engine.check_integrity()
    assert ended["2"].finish is Finish.ERROR and "non-finite" in str(ended["2"].error)
    assert engine.stats.failed_requests_total >= 1
    healthy_ones = {"0", "1", "3", "4"} - met
    assert healthy_ones
    assert all(tokens[i] == clean[int(i)] for i in healthy_ones)


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(max_tokens=20, temperature=0.9, seed=3)])
def test_a_dead_draft_head_costs_acceptance_only(monkeypatch: pytest.MonkeyPatch, params: SamplingParams) -> None:
    model, asked = tiny_model(), prompts(6)
    plain = run(tiny_engine(model, 0), asked, GREEDY)
    healthy = model.mtp

    def mtp(*arguments: Any) -> Any:
        hidden = healthy(*arguments)
        return type(hidden)(hidden.head * torch.nan, hidden.recycle * torch.nan)

    monkeypatch.setattr(model, "mtp", mtp)
    engine = tiny_engine(model, 3)
    tokens = run(engine, asked, params)
    assert all(len(t) == 20 for t in tokens)
    assert engine.stats.draft_tokens_total > 0
    if params.greedy:
        assert tokens == plain
