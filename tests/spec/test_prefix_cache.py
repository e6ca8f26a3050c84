"""After a hit nothing is different: text, drafts, and which of them were accepted are those of an engine without a cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mtpserve.config import SpecConfig
from mtpserve.core.request import Finish, Request, TokenEvent
from mtpserve.core.sampling import SamplingParams
from mtpserve.engine.engine import Engine
from tests.tiny import VOCAB, tiny_engine, tiny_model

PAGE = 4
TREE = SpecConfig(speculative_algorithm="MTP", speculative_num_steps=3, speculative_eagle_topk=3, speculative_num_draft_tokens=8)
SHAPES: dict[str, int | SpecConfig] = {"plain": 0, "chain": 3, "tree": TREE}
SYSTEM = torch.randint(VOCAB, (22,), generator=torch.Generator().manual_seed(5)).tolist()


def said(engine: Engine, name: str, prompt: list[int], **sampling: Any) -> list[TokenEvent]:
    """All events of one request, which is alone, but for times."""
    engine.add(Request(name, prompt, SamplingParams(max_tokens=18, **sampling)))
    events = []
    while engine.has_work:
        events += engine.step()
        engine.check_integrity()
    assert all(event.error is None for event in events)
    return events


def spoken(events: list[TokenEvent]) -> list[int]:
    return [token for event in events for token in event.tokens]


def facts(events: list[TokenEvent]) -> list[object]:
    """What a client may see of them, and which drafts there were."""
    return [(event.tokens, event.num_accepted_tokens, event.proposal, event.logprobs, event.finish) for event in events]


def conversation(engine: Engine, turns: int, **sampling: Any) -> tuple[list[list[object]], list[int]]:
    """Each turn's events, and the prompt tokens that it found."""
    seen, cached, history = [], [], list(SYSTEM)
    for turn in range(turns):
        history += [(7 * turn + i) % VOCAB for i in range(3)]
        events = said(engine, f"turn {turn}", history, **sampling)
        seen.append(facts(events))
        cached.append(sum(event.num_cached_tokens for event in events))
        history += spoken(events)
    return seen, cached


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("family", ["deepseek", "sparse", "mimo"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    "sampling", [{"temperature": 0.0}, {"temperature": 0.9, "seed": 3, "repetition_penalty": 1.1}], ids=["greedy", "drawn"]
)
def test_a_conversation(family: str, shape: str, sampling: dict[str, Any], backend: str) -> None:
    model = tiny_model(family, kernels="cpu" if backend == "cpu" else "torch")
    with_cache, found = conversation(tiny_engine(model, SHAPES[shape], page_size=PAGE, backend=backend), 4, **sampling)
    without, nothing = conversation(tiny_engine(model, SHAPES[shape], page_size=PAGE, backend=backend, fingerprint=None), 4, **sampling)
    assert with_cache == without
    # Everything but the last page's rest: the last token of an answer was never computed.
    assert found == [0, *[(22 + 3 * turn + 18 * turn - 1) // PAGE * PAGE for turn in range(1, 4)]] and nothing == [0] * 4


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("length", [4 * PAGE, 4 * PAGE + 1, 5 * PAGE - 1])
def test_log_probabilities_after_a_hit(shape: str, length: int) -> None:
    """Bitwise: with kernels whose numbers do not depend on what shares a step."""
    model, asked = tiny_model(kernels="cpu"), {"temperature": 0.0, "logprobs": 3}
    engine = tiny_engine(model, SHAPES[shape], page_size=PAGE, backend="cpu")
    first, second = (said(engine, name, SYSTEM[:length], **asked) for name in ("first", "second"))
    assert facts(first) == facts(second) and sum(event.num_cached_tokens for event in second) == min(length // PAGE * PAGE, length - 1)


def test_a_request_that_scores_its_prompt_computes_it() -> None:
    model, asked = tiny_model(), {"temperature": 0.0, "prompt_logprobs": 1}
    engine = tiny_engine(model, 3, page_size=PAGE)
    first, second = (said(engine, name, SYSTEM, **asked) for name in ("first", "second"))
    assert [event.prompt_logprobs for event in first] == [event.prompt_logprobs for event in second]
    assert sum(len(event.prompt_logprobs or []) for event in second) == len(SYSTEM) - 1
    assert sum(event.num_cached_tokens for event in second) == 0
    assert sum(event.num_cached_tokens for event in said(engine, "third", SYSTEM, temperature=0.0)) == 20, "others find what it computed"


@pytest.mark.parametrize("exact", [False, True])
def test_exact_mode_shares_what_was_computed_exactly(exact: bool) -> None:
    model = tiny_model()
    engine = tiny_engine(model, 3, page_size=PAGE, exact=exact)
    first, second = (said(engine, name, SYSTEM, temperature=0.0, logprobs=2) for name in ("first", "second"))
    assert spoken(first) == spoken(second) and sum(event.num_cached_tokens for event in second) == 20
    assert not exact or facts(first) == facts(second)


@pytest.mark.parametrize("shape", SHAPES)
def test_who_comes_back_after_a_preemption_goes_on_as_it_was(shape: str) -> None:
    model = tiny_model()
    prompts = [[(11 * i + j) % VOCAB for j in range(14 + i)] for i in range(5)]

    def run(engine: Engine) -> dict[str, list[object]]:
        events: dict[str, list[TokenEvent]] = {str(i): [] for i in range(5)}
        for i, prompt in enumerate(prompts):
            engine.add(Request(str(i), prompt, SamplingParams(max_tokens=30, temperature=0.9, seed=i)))
        while engine.has_work:
            for event in engine.step():
                events[event.id].append(event)
            engine.check_integrity()
        return {name: facts(each) for name, each in events.items()}

    roomy, tight = tiny_engine(model, SHAPES[shape]), tiny_engine(model, SHAPES[shape], pages=26)
    assert run(roomy) == run(tight) and tight.stats.preemptions_total > 0


def test_what_was_not_a_number_is_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request whose numbers turned bad fails, and leaves no page for others to find."""
    model = tiny_model()
    engine = tiny_engine(model, 3, page_size=PAGE, budget=8)
    good = spoken(said(engine, "good", SYSTEM[:8], temperature=0.0))
    embed = model.embed.forward
    monkeypatch.setattr(model.embed, "forward", lambda ids: torch.where((ids == SYSTEM[9]).unsqueeze(-1), torch.nan, embed(ids)))
    engine.add(Request("bad", SYSTEM, SamplingParams(max_tokens=4, temperature=0.0)))
    events = []
    while engine.has_work:
        events += engine.step()
    assert events[-1].finish is Finish.ERROR
    monkeypatch.setattr(model.embed, "forward", embed)
    again = said(engine, "again", SYSTEM, temperature=0.0)
    assert spoken(again) == spoken(said(tiny_engine(model, 0), "plain", SYSTEM, temperature=0.0)) and good
    assert sum(event.num_cached_tokens for event in again) == 0
