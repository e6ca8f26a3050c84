"""A drafter is one file and one line: draft models from a test module, registered by name, draft as the package's own do."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mtpserve.config import SpecConfig
from mtpserve.config.drafters import DRAFTERS
from mtpserve.core.errors import ConfigError
from mtpserve.core.request import Request
from mtpserve.core.sampling import SamplingParams, Speculation
from mtpserve.engine.engine import Engine
from tests.spec.test_logprobs import PARAMS, close, scores
from tests.tiny import prompts, run, tiny_engine, tiny_model

GREEDY = SamplingParams(max_tokens=24, temperature=0)
SHAPES = {
    "chain": SpecConfig(speculative_num_steps=3, speculative_algorithm="MTP"),
    "tree": SpecConfig(speculative_num_steps=3, speculative_algorithm="MTP", speculative_eagle_topk=3, speculative_num_draft_tokens=9),
    "beside n-grams": SpecConfig(speculative_num_steps=2, speculative_algorithm="MTP+NGRAM"),
}


def engine_with(target: str, shape: str, family: str = "mimo", **options: object) -> Engine:
    spec = SHAPES[shape]
    with DRAFTERS.extended("OWN", f"tests.spec.own_drafters:{target}"):
        assert spec.speculative_algorithm is not None
        spec = replace(spec, speculative_algorithm=spec.speculative_algorithm.replace("MTP", "OWN"))
        return tiny_engine(tiny_model(family), spec, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("target", ["TAPPING", "SMALL"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("family", ["mimo", "deepseek"])
def test_greedy_text_is_that_of_plain_decoding(target: str, shape: str, family: str) -> None:
    asked = prompts(6)
    engine = engine_with(target, shape, family, budget=45, seats=4)
    assert run(engine, asked, GREEDY) == run(tiny_engine(tiny_model(family), 0), asked, GREEDY)
    assert engine.stats.draft_tokens_total > 100


@pytest.mark.parametrize("target", ["TAPPING", "SMALL"])
@pytest.mark.parametrize("length", [16, 17])
def test_drafts_do_not_depend_on_who_computed_the_prompt(target: str, length: int) -> None:
    """Their rows of a shared prompt's pages, and the one after it, are what they would have been alone."""
    prompt, drafts = (prompts(1, seed=3, longest=30)[0] * 20)[:length], []
    for shared in (False, True):
        engine = engine_with(target, "chain", page_size=4, fingerprint=b"" if shared else None)
        for i in range(3):
            engine.add(Request(str(i), prompt, GREEDY))
        proposed: dict[str, list[list[int]]] = {str(i): [] for i in range(3)}
        while engine.has_work:
            for event in engine.step():
                proposed[event.id].append(event.proposal.tokens)
        drafts.append(proposed)
    assert drafts[0] == drafts[1]


def test_chunks_of_a_prompt_change_no_draft() -> None:
    """Also the row of a request's first token, which a draft model with a lag of 0 has and no other."""
    drafted = []
    for budget in (12, 64):
        engine = engine_with("SMALL", "chain", budget=budget)
        engine.add(Request("0", prompts(1, seed=2, longest=30)[0] * 2, GREEDY))
        tokens: list[int] = []
        while engine.has_work:
            tokens += [token for event in engine.step() for token in event.proposal.tokens]
        drafted.append(tokens)
    assert drafted[0] == drafted[1]


CONTROLLED = [
    *PARAMS,
    SamplingParams(max_tokens=20, temperature=0, speculation=Speculation(enabled=False)),
    SamplingParams(max_tokens=20, temperature=0, speculation=Speculation(num_steps=1), repetition_penalty=1.4),
    SamplingParams(max_tokens=20, temperature=0.9, seed=4, speculation=Speculation(num_steps=2), presence_penalty=0.5),
    SamplingParams(max_tokens=20, temperature=0.7, seed=5, top_k=9, logprobs=2, min_tokens=3, allowed_token_ids=tuple(range(20))),
]


@pytest.mark.parametrize("target", ["TAPPING", "SMALL"])
@pytest.mark.parametrize("shape", SHAPES)
def test_requests_of_every_kind_in_one_batch(target: str, shape: str) -> None:
    """Rules, log-probabilities, depths of their own; where drafts are point masses also what is sampled is the very same."""
    plain, found = scores(tiny_engine(tiny_model("mimo"), 0), CONTROLLED), scores(engine_with(target, shape), CONTROLLED)
    same = [str(i) for i, params in enumerate(CONTROLLED) if params.temperature == 0 or shape != "chain"]
    assert len(same) >= 7 and [found[0][i] for i in same] == [plain[0][i] for i in same]
    for ours, theirs in zip(found[1:], plain[1:], strict=True):
        close({i: ours[i] for i in same}, {i: theirs[i] for i in same})


@pytest.mark.parametrize("target", ["TAPPING", "SMALL"])
def test_requests_draft_no_deeper_than_they_ask(target: str) -> None:
    engine, deepest = engine_with(target, "chain"), dict[str, int]()
    for i, (prompt, each) in enumerate(zip(prompts(len(CONTROLLED)), CONTROLLED, strict=True)):
        engine.add(Request(str(i), prompt, each))
    while engine.has_work:
        for event in engine.step():
            deepest[event.id] = max(deepest.get(event.id, 0), len(event.proposal.tokens))
            assert set(event.proposal.sources) <= {"own"}
    assert [deepest[str(i)] for i in range(4, 9)] == [3, 0, 1, 2, 3]


def test_its_name_is_known_as_long_as_it_is_registered() -> None:
    with pytest.raises(ConfigError, match=r"must be auto, none, MTP, NEXTN, EAGLE, .*, NGRAM, or a draft model and NGRAM, .* got 'OWN'"):
        SpecConfig(speculative_algorithm="OWN")
