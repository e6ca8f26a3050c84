"""Three hundred requests that are aborted at any moment, with all drafts accepted and with none: afterwards nothing is held."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

from mtpserve.core.plan import StepPlan
from mtpserve.core.request import Request
from mtpserve.core.sampling import SamplingParams
from mtpserve.engine.engine import Engine
from tests.tiny import VOCAB, run, tiny_engine, tiny_model

REQUESTS, SEATS = 300, 6


def request(number: int, dice: random.Random) -> Request:
    """Ends by length, by a stop token or by the end of the text, if it comes to that; some score their prompt, some share it."""
    prompt = [dice.randrange(6, VOCAB) for _ in range(dice.randrange(1, 36))]
    params = SamplingParams(
        max_tokens=dice.randrange(1, 24),
        temperature=dice.choice([0.0, 0.9]),
        seed=number,
        stop_token_ids=tuple(dice.sample(range(VOCAB), dice.choice([0, 3]))),
        ignore_eos=dice.random() < 0.5,
        prompt_logprobs=dice.choice([None, None, 2]),
    )
    return Request(str(number), prompt, params)


def moment(engine: Engine, name: str, verified: set[str]) -> str:
    req = engine._scheduler.live.get(name)
    if req is None:
        return "ended"
    if req.req_idx is None:
        return "queued"
    if req.num_computed_tokens < req.num_prompt_tokens:
        return "prompt"
    return "verifying" if name in verified else "decoding"


@pytest.mark.parametrize(("rate", "overlap"), [(1.0, 1), (0.0, 0)])
def test_aborted_requests_leave_nothing(monkeypatch: pytest.MonkeyPatch, rate: float, overlap: int) -> None:
    model, dice, moments = tiny_model(), random.Random(7), Counter[str]()
    options: dict[str, Any] = {"pages": 36, "budget": 24, "seats": SEATS, "eos": (5,), "rates": [rate] * 3, "overlap": overlap}
    engine = tiny_engine(model, 3, **options)
    doomed: dict[int, list[tuple[str, bool]]] = {}  # by step: whom to abort, and whether while it is computed
    step, added, launch = 0, 0, engine.runner.launch

    def abort(inside: bool, verified: set[str]) -> None:
        for name, within in doomed.get(step, []):
            if within == inside:
                moments[moment(engine, name, verified)] += 1
                engine.abort(name)

    def launched(plan: StepPlan) -> Any:
        made = launch(plan)
        names = {req.req_idx: req.id for req in engine._scheduler.running}
        abort(inside=True, verified={names[span.req_idx] for span in plan.spans if span.num_draft_tokens})
        return made

    monkeypatch.setattr(engine.runner, "launch", launched)
    while added < REQUESTS or engine.has_work:
        while added < REQUESTS and len(engine._scheduler.waiting) < 5:
            asked = request(added, dice)
            for _ in range(min(dice.choice([1, 1, 3]), REQUESTS - added)):
                engine.add(Request(str(added), asked.prompt, asked.sampling))
                doomed.setdefault(step + dice.randrange(12), []).append((str(added), dice.random() < 0.5))
                added += 1
        abort(inside=False, verified=set())
        engine.step()
        engine.check_integrity()
        step += 1

    assert min(moments[kind] for kind in ("queued", "prompt", "decoding", "verifying")) > 10
    stats = engine.stats
    assert (stats.running, stats.waiting, stats.pages_used, stats.failed_requests_total) == (0, 0, 0, 0)
    assert engine._scheduler.num_free_slots == SEATS and not engine._scheduler.live
    assert stats.draft_tokens_total > 300 and stats.preemptions_total > 0
    # A stop cuts what was accepted.
    assert stats.accepted_tokens_total == 0 if rate == 0 else stats.accepted_tokens_total > 0.8 * stats.draft_tokens_total
    last = [request(number, dice) for number in range(SEATS)]
    prompts, params = [one.prompt for one in last], [one.sampling for one in last]
    assert run(engine, prompts, params) == run(tiny_engine(tiny_model(), 3, **options), prompts, params)
