"""Numbers that went bad: in the target they end one request, in the draft head they cost acceptance and nothing else."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import pytest
import torch

from mtpserve.config import CacheConfig, EngineConfig, ModelConfig, SpecConfig
from mtpserve.core.plan import StepPlan
from mtpserve.core.request import Finish, Request, TokenEvent
from mtpserve.core.sampling import SamplingParams
from mtpserve.engine.startup.build import build_engine
from tests.runtime.recorders import draft_one_by_one
from tests.tiny import prompts, replace_passes, run, tiny_engine, tiny_model

GREEDY = SamplingParams(max_tokens=20, temperature=0)
SHORT = SamplingParams(max_tokens=16, temperature=0)
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


@dataclass
class Verified:
    """What became of four requests, of which the third had a bad row in its first verification."""

    tokens: list[list[int]]
    last: dict[str, TokenEvent]
    accepted: int  # by that verification
    failed: int
    pages_used: int


def verified(right: list[int] | None, row: int, bad: float | None) -> Verified:
    """`row` 0 is the committed token's, row j draft j's; with `bad` None nothing is wrong. `right`: the third's drafts."""
    model = tiny_model()
    engine = tiny_engine(model, 3 if right is None else SpecConfig(speculative_algorithm="NGRAM", speculative_num_steps=3))
    launch, healthy, place, hit = engine.runner.launch, model.trunk, list[int](), False

    def launched(plan: StepPlan) -> Any:
        nonlocal hit
        ends = accumulate(span.num_rows for span in plan.spans)
        first = [
            end - span.num_draft_tokens - 1
            for end, span in zip(ends, plan.spans, strict=True)
            if span.req_idx == 2 and span.num_draft_tokens and not hit
        ]
        place[:] = [start + row for start in first]
        hit = hit or bool(place)
        return launch(plan)

    def trunk(*arguments: Any) -> Any:
        hidden = healthy(*arguments)
        if bad is not None:
            hidden.head[place] = bad
        return hidden

    engine.runner.launch, model.trunk = launched, trunk  # type: ignore[method-assign]
    for i, prompt in enumerate(prompts(4)):
        engine.add(Request(str(i), prompt, SHORT, prediction=right if right is not None and i == 2 else []))
    found = Verified([[] for _ in range(4)], {}, -1, 0, -1)
    while engine.has_work:
        for event in engine.step():
            found.tokens[int(event.id)] += event.tokens
            found.last[event.id] = event
            if event.id == "2" and place:
                found.accepted = event.num_accepted_tokens
        engine.check_integrity()
    assert hit
    found.failed, found.pages_used = engine.stats.failed_requests_total, engine.stats.pages_used
    return found


@pytest.mark.parametrize("accepted", [True, False])
@pytest.mark.parametrize(("row", "bad"), [(0, torch.nan), (1, torch.nan), (3, torch.nan), (3, torch.inf), (2, -torch.inf)])
def test_a_bad_row_of_a_verification(row: int, bad: float, accepted: bool) -> None:
    """It ends its request where it had a say, behind the drafts that were accepted; where it had none, nothing happens."""
    plain = run(tiny_engine(tiny_model(), 0), prompts(4), SHORT)
    right = plain[2] if accepted else None
    clean, found = verified(right, row, None), verified(right, row, bad)
    assert clean.tokens == plain and (clean.failed, clean.pages_used, found.pages_used) == (0, 0, 0)
    assert clean.accepted == (8 if accepted else 0)
    others = [0, 1, 3]
    assert [found.tokens[i] for i in others] == [plain[i] for i in others]
    if row <= clean.accepted:
        assert found.last["2"].finish is Finish.ERROR and found.last["2"].tokens == [] and found.failed == 1
        assert found.tokens[2] == plain[2][: len(found.tokens[2])] != plain[2]
    else:
        assert found.tokens[2] == plain[2] and found.failed == 0


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(max_tokens=20, temperature=0.9, seed=3)])
def test_a_dead_draft_head_costs_acceptance_only(params: SamplingParams) -> None:
    model, asked = tiny_model(), prompts(6)
    plain = run(tiny_engine(model, 0), asked, GREEDY)
    healthy = model.mtp_head.extend  # type: ignore[union-attr]

    def mtp(*arguments: Any) -> Any:
        hidden = healthy(*arguments)
        return type(hidden)(hidden.head * torch.nan, hidden.features * torch.nan)

    replace_passes(model, mtp)
    engine = tiny_engine(model, 3)
    tokens = run(engine, asked, params)
    assert all(len(t) == 20 for t in tokens)
    assert engine.stats.draft_tokens_total > 0
    if params.greedy:
        assert tokens == plain


def test_a_dead_draft_head_shows_in_the_rate_of_acceptance() -> None:
    """The bundled model's head is right most of the time, as that of the tiny one never is."""
    cache, spec = CacheConfig(max_total_tokens=1024), SpecConfig(speculative_algorithm="NEXTN", speculative_num_steps=3)
    engine = build_engine(EngineConfig(model=ModelConfig(dtype="float32"), cache=cache, spec=spec))
    model = engine.runner.step.model  # type: ignore[attr-defined]
    draft_one_by_one(engine)
    texts = [run(engine, [[5, 6, 7]], SamplingParams(max_tokens=40, temperature=0, ignore_eos=True))]
    accepted, drafted = engine.stats.accepted_tokens_total, engine.stats.draft_tokens_total
    healthy = model.mtp_head.extend  # type: ignore[union-attr]

    def mtp(*arguments: Any) -> Any:
        hidden = healthy(*arguments)
        return type(hidden)(hidden.head * torch.nan, hidden.features * torch.nan)

    replace_passes(model, mtp)
    texts.append(run(engine, [[5, 6, 7]], SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)))
    accepted_dead, drafted_dead = engine.stats.accepted_tokens_total - accepted, engine.stats.draft_tokens_total - drafted
    assert texts[0] == texts[1]
    assert accepted_dead / drafted_dead < accepted / drafted / 2
