"""A request whose engine was lost goes on in another one: text, log-probabilities and end are those of the request that was not cut."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest

from mtpserve.config import CacheConfig, EngineConfig, ModelConfig, SpecConfig
from mtpserve.core.errors import InvalidRequest
from mtpserve.core.request import Finish, Request, TokenLogprob
from mtpserve.core.sampling import GrammarSpec, SamplingParams
from mtpserve.engine.engine import Engine
from mtpserve.engine.startup.build import build_engine
from tests import selection
from tests.spec.test_trees import tree
from tests.tiny import prompts, tiny_engine, tiny_model

SAMPLED = SamplingParams(max_tokens=20, temperature=0.9, seed=3)
REQUESTS: dict[str, SamplingParams] = {
    "greedy": SamplingParams(max_tokens=20, temperature=0),
    "sampled": SAMPLED,
    "penalties": replace(SAMPLED, presence_penalty=1.5, frequency_penalty=0.7, repetition_penalty=1.4),
    "at least": replace(SAMPLED, min_tokens=13, stop_token_ids=tuple(range(0, 36, 2))),
    "to a stop": replace(SAMPLED, max_tokens=40, stop_token_ids=(3, 9, 17)),
    "log-probabilities": replace(SAMPLED, logprobs=3),
    "scored prompt": replace(SAMPLED, prompt_logprobs=2, logprobs=0),
    "bias": replace(SAMPLED, logit_bias={4: 3.0, 5: -100.0}),
    "no drafts": replace(SAMPLED, top_k=9, top_p=0.8),
}


@dataclass
class Heard:
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    finish: Finish | None = None
    cuts: list[tuple[int, int]] = field(default_factory=list)  # tokens and scored prompt tokens after each event


def hear(engine: Engine, requests: list[Request]) -> dict[str, Heard]:
    """All at once."""
    heard = {request.id: Heard() for request in requests}
    for request in requests:
        engine.add(request)
    while engine.has_work:
        for event in engine.step():
            assert event.error is None, event.error
            found = heard[event.id]
            found.tokens += event.tokens
            found.logprobs += event.logprobs or []
            found.prompt_logprobs += event.prompt_logprobs or []
            found.finish = event.finish
            found.cuts.append((len(found.tokens), len(found.prompt_logprobs)))
    return heard


def close(ours: list[TokenLogprob], theirs: list[TokenLogprob]) -> bool:
    return len(ours) == len(theirs) and all(
        one.rank == two.rank and one.logprob == pytest.approx(two.logprob, abs=1e-4) for one, two in zip(ours, theirs, strict=True)
    )


@pytest.mark.parametrize(
    "drafts", [0, SpecConfig(speculative_algorithm="NEXTN", speculative_num_steps=3), tree(3, 4, 12)], ids=["plain", "adaptive", "tree"]
)
@pytest.mark.parametrize("pages", [200, 30], ids=["room", "preemption"])
def test_it_goes_on_as_if_nothing_had_happened(drafts: int | SpecConfig, pages: int) -> None:
    model, asked = tiny_model(), prompts(len(REQUESTS), longest=40)
    requests = [Request(name, prompt, sampling) for (name, sampling), prompt in zip(REQUESTS.items(), asked, strict=True)]
    options = {"pages": pages, "budget": 19, "seats": 4}
    whole = hear(tiny_engine(model, drafts, **options), requests)
    assert whole["to a stop"].finish is Finish.STOP and len({tuple(heard.tokens) for heard in whole.values()}) == len(whole)
    for each in range(7) if selection.ALL else (0, 3):
        # Cut after some event of each, so that several go on side by side, each from another place.
        cuts = {name: heard.cuts[min(each, len(heard.cuts) - 2)] for name, heard in whole.items()}
        moved = [
            replace(
                request,
                prior_output_ids=whole[request.id].tokens[: cuts[request.id][0]],
                num_scored_prompt_tokens=cuts[request.id][1],
                is_migrated=True,
            )
            for request in requests
        ]
        engine = tiny_engine(model, drafts, **options)
        for name, heard in hear(engine, moved).items():
            tokens, scored = cuts[name]
            assert heard.tokens == whole[name].tokens[tokens:] and heard.finish is whole[name].finish, (name, tokens)
            assert close(heard.logprobs, whole[name].logprobs[tokens:]) and close(
                heard.prompt_logprobs, whole[name].prompt_logprobs[scored:]
            )
        assert engine.stats.prompt_tokens_total == sum(len(request.prompt) for request in moved if not request.prior_output_ids), (
            "counted once"
        )


@pytest.mark.parametrize("algorithm", [None, "NEXTN"])
def test_a_grammar_goes_on(algorithm: str | None) -> None:
    """On the demo model's own tokens."""
    config = EngineConfig(
        model=ModelConfig(device="cpu", dtype="float32"),
        cache=CacheConfig(max_total_tokens=2048),
        spec=SpecConfig(speculative_algorithm=algorithm),
    )
    grammar = GrammarSpec("regex", r"def [a-z]{5,9}\([a-z]+, [a-z]+\): return [0-9]{6,12}")
    request = Request("a", [5, 6, 7], SamplingParams(max_tokens=60, temperature=0.8, seed=5, grammar=grammar))
    whole = hear(build_engine(config), [request])["a"]
    engine = build_engine(config)
    for cut in range(0, len(whole.tokens) - 1, 2 if selection.ALL else 7):
        moved = replace(request, id=f"moved {cut}", prior_output_ids=whole.tokens[:cut], is_migrated=True)
        assert hear(engine, [moved])[moved.id].tokens == whole.tokens[cut:]


def test_seeds_that_are_drawn_elsewhere() -> None:
    """They do not couple drafts to the noise, as a request's own seed does, and the same one gives the same text."""
    model, sampling = tiny_model(), SamplingParams(max_tokens=20, temperature=0.9)
    texts = [hear(tiny_engine(model, 0), [Request("a", [7, 8], sampling, seed=seed)])["a"].tokens for seed in (1, 1, 2)]
    own = hear(tiny_engine(model, 0), [Request("a", [7, 8], replace(sampling, seed=1))])["a"].tokens
    assert texts[0] == texts[1] == own != texts[2]


def test_what_cannot_go_on_is_refused() -> None:
    engine = tiny_engine(tiny_model(), 0)
    with pytest.raises(InvalidRequest, match="20 tokens were said already, and the request may say 20"):
        engine.add(Request("a", [7], REQUESTS["greedy"], prior_output_ids=[5] * 20))
    with pytest.raises(InvalidRequest, match="said must be token ids"):
        engine.add(Request("a", [7], REQUESTS["greedy"], prior_output_ids=[-1]))
