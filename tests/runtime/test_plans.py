"""What crosses between scheduler and runner could cross a socket: as msgpack and back it gives the same text, and it is small."""

from __future__ import annotations

from collections.abc import Mapping, Sequence as Seq
from typing import Any

import msgspec
import pytest
from torch import Tensor

from mtpserve.config import SpecConfig
from mtpserve.core.errors import InvalidRequest
from mtpserve.core.plan import StepPlan, StepResult
from mtpserve.core.protocols.runner import Launched, ModelRunner
from mtpserve.core.request import Finish, Request, TokenEvent
from mtpserve.core.sampling import GrammarSpec, SamplingParams, Speculation
from mtpserve.engine.engine import Engine
from tests.engine.harness import PROMPTS, Bench
from tests.grammars import TokenGrammar
from tests.spec.diagonal import diagonal
from tests.tiny import VOCAB, prompts, tiny_engine, tiny_model

EOS = 11
CHAIN = SpecConfig(speculative_algorithm="MTP", speculative_num_steps=3)
TREE = SpecConfig(speculative_algorithm="MTP", speculative_num_steps=3, speculative_eagle_topk=2, speculative_num_draft_tokens=8)
NGRAM = SpecConfig(speculative_algorithm="NGRAM", speculative_num_steps=3)
MIXED = SpecConfig(speculative_algorithm="MTP+NGRAM", speculative_num_steps=2)
SPECS = {"chain": CHAIN, "tree": TREE, "ngram": NGRAM, "mixed": MIXED}


class Rising(TokenGrammar):
    """Each token is at most 9 above the one before it; after the last comes 0. Nothing but EOS follows EOS."""

    def allowed(self, output: Seq[int]) -> list[int]:
        if EOS in output:
            return [EOS]
        last = output[-1] if output else -1
        return [token for token in range(last + 1, last + 10) if token < VOCAB] or [0]


class Risings:
    def __init__(self) -> None:
        self.compiled = 0

    def compile(self, spec: GrammarSpec) -> Rising:
        self.compiled += 1
        return Rising()


class Shy:
    """An operator's processor that looks at the tokens: it halves the logit of the last one's successor."""

    def __call__(self, tokens: list[int], prompt_len: int, params: Mapping[str, object], logits: Tensor) -> Tensor:
        logits = logits.clone()
        if params.get("shy"):
            logits[(tokens[-1] + 1) % VOCAB] -= 2.0 + (len(tokens) - prompt_len) % 3
        return logits


class Wired:
    """core.protocols.ModelRunner whose plans and results travel as bytes."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner, self.sizes, self.processors = runner, runner.sizes, runner.processors
        self.plans: list[bytes] = []

    def launch(self, plan: StepPlan) -> Launched:
        self.plans.append(msgspec.msgpack.encode(plan))
        return WiredStep(self.runner.launch(msgspec.msgpack.decode(self.plans[-1], type=StepPlan)))


class WiredStep:
    def __init__(self, launched: Launched) -> None:
        self.launched, self.ended = launched, launched.ended

    def result(self) -> StepResult:
        return msgspec.msgpack.decode(msgspec.msgpack.encode(self.launched.result()), type=StepResult)


def wire(engine: Engine) -> Wired:
    engine.runner = wired = Wired(engine.runner)
    return wired


def asked(processors: bool) -> list[Request]:
    """Requests that differ in everything that a plan may have to say of them; two share one prompt."""
    hot: dict[str, Any] = {"temperature": 0.8, "max_tokens": 26}
    params = [
        SamplingParams(**hot, seed=0, stop_token_ids=(3, 17), frequency_penalty=0.4),
        SamplingParams(**hot, seed=1, repetition_penalty=1.3, min_tokens=9, logit_bias={4: 3.0, 5: -1.0}),
        SamplingParams(**hot, seed=2, top_k=7, top_p=0.9, min_p=0.02, logprobs=2, prompt_logprobs=1),
        SamplingParams(**hot, seed=3, allowed_token_ids=(1, 2, 5, 8, 13, 21, 34), speculation=Speculation(num_steps=1)),
        SamplingParams(max_tokens=26, temperature=0.0, ignore_eos=True),
        SamplingParams(**hot, seed=4, grammar=GrammarSpec("regex", "rising")),
        SamplingParams(max_tokens=26, temperature=0.0, grammar=GrammarSpec("regex", "rising")),
    ]
    if processors:
        params += [SamplingParams(**hot, seed=5, custom_params={"shy": True, "more": [1, {"a": None}]})]
    texts = prompts(len(params), seed=2)
    requests = [
        Request(str(i), text, each, bad_words=[[i, 2], [7]] if i % 2 else [], prediction=[4, 5, 6, 7, 8, 9] * 3 if i % 3 == 0 else [])
        for i, (text, each) in enumerate(zip(texts, params, strict=True))
    ]
    twin = SamplingParams(**hot, seed=9)
    return [*requests, Request("twin", texts[0], twin)]


def events(engine: Engine, requests: Seq[Request], compiled: bool = False) -> dict[str, list[TokenEvent]]:
    made: dict[str, list[TokenEvent]] = {request.id: [] for request in requests}
    for request in requests:
        engine.add(request, compiled)
    while engine.has_work:
        for event in engine.step():
            made[event.id].append(event)
    engine.check_integrity()
    return made


def said(made: dict[str, list[TokenEvent]]) -> dict[str, Any]:
    """All but the times, and how tokens came together in steps, which the schedule may change."""
    return {
        name: (
            [token for event in given for token in event.tokens],
            [score for event in given for score in event.logprobs or []],
            [score for event in given for score in event.prompt_logprobs or []],
            given[-1].finish,
            given[-1].error,
        )
        for name, given in made.items()
    }


def texts(made: dict[str, Any]) -> dict[str, list[int]]:
    return {name: tokens for name, (tokens, *_) in made.items()}


@pytest.mark.parametrize(("spec", "late"), diagonal(SPECS, {"0": (0, False), "1, processors": (1, True), "2": (2, False)}))
def test_plans_and_results_can_travel(spec: SpecConfig, late: tuple[int, bool]) -> None:
    overlap, processors = late
    options: dict[str, Any] = {"eos": (EOS,), "budget": 24, "grammars": Risings(), "processors": [Shy()] if processors else []}
    plain, unwired, wired = (tiny_engine(tiny_model("mimo"), spec, overlap=steps, **options) for steps in (0, overlap, overlap))
    wire(wired)
    made = said(events(wired, asked(processors)))
    assert made == said(events(unwired, asked(processors)))
    assert texts(made) == texts(said(events(plain, asked(processors))))
    assert all(error is None for *_, error in made.values()) and {finish for *_, finish, _ in made.values()} > {Finish.STOP}


@pytest.mark.parametrize(("overlap", "pages"), [(0, 60), (2, 42)])
def test_who_is_preempted_is_told_of_again(overlap: int, pages: int) -> None:
    """Its grammar starts afresh with the output that there is."""
    requests = sorted(asked(processors=False), key=lambda request: request.sampling.grammar is not None)
    plain = said(events(tiny_engine(tiny_model(), CHAIN, eos=(EOS,), grammars=Risings()), requests))
    grammars = Risings()
    engine = tiny_engine(tiny_model(), CHAIN, eos=(EOS,), grammars=grammars, pages=pages, overlap=overlap)
    wired = wire(engine)
    tight = said(events(engine, requests))
    assert texts(tight) == texts(plain)
    new_requests = [each for plan in wired.plans for each in msgspec.msgpack.decode(plan, type=StepPlan).new_requests]
    again = [each for each in new_requests if each.output_ids]
    assert len(again) == engine.stats.preemptions_total > 0
    assert any(each.request.sampling.grammar is not None for each in again) and grammars.compiled > 2


def decoding(requests: int) -> StepPlan:
    """The plan of a steady step: `requests` that decode with three drafts."""
    bench = Bench(running=requests, pages=200, page_size=256, context=1100, budget=4 * requests)
    kept: list[StepPlan] = []
    launch = bench.runner.launch

    def launched(plan: StepPlan) -> Any:
        kept.append(plan)
        return launch(plan)

    bench.runner.launch = launched  # type: ignore[method-assign]
    for i in range(requests):
        bench.add(f"q{i}", PROMPTS["r3"], max_tokens=1000)
    for _ in range(40):
        bench.step()
    return kept[-1]


def test_a_plan_is_small() -> None:
    steady = decoding(8)
    assert [span.num_draft_tokens for span in steady.spans] == [3] * 8
    assert not steady.new_requests and not steady.new_blocks and len(msgspec.msgpack.encode(steady)) < 100


class Once(Risings):
    """What the engine compiles is good; what the runner would compile anew is not there."""

    def compile(self, spec: GrammarSpec) -> Rising:
        if self.compiled:
            raise InvalidRequest("regex: no more of them", "regex")
        return super().compile(spec)


@pytest.mark.parametrize("overlap", [0, 1])
def test_a_request_that_cannot_be_seated_ends_alone(overlap: int) -> None:
    greedy, spec = SamplingParams(max_tokens=12, temperature=0), GrammarSpec("regex", "rising")
    others = [Request(str(i), text, greedy) for i, text in enumerate(prompts(3))]
    alone = said(events(tiny_engine(tiny_model(), CHAIN), others))
    engine = tiny_engine(tiny_model(), CHAIN, grammars=Once(), overlap=overlap, budget=24)
    engine.compile(spec)
    asking = [Request(name, [1, 2, 3] * 10, SamplingParams(max_tokens=12, grammar=spec)) for name in ("good", "bad")]
    made = said(events(engine, [*asking, *others], compiled=True))
    assert made.pop("bad")[3:] == (Finish.ERROR, "the engine could not start this request: InvalidRequest")
    text, *_, finish, error = made.pop("good")
    assert (len(text), finish, error) == (12, Finish.LENGTH, None) and made == alone
