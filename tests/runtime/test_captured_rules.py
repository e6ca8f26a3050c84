"""Captured steps whose requests have rules and want log-probabilities: the same tokens and numbers as launched ones, and nothing beside."""

from __future__ import annotations

from typing import Any

import pytest

from mtpserve.config import SpecConfig
from mtpserve.core.request import Request, TokenLogprob
from mtpserve.core.sampling import SamplingParams
from mtpserve.engine.engine import Engine
from mtpserve.runtime.runner import Runner
from tests.runtime.recorders import Again, Watched, blinded, runner_of
from tests.tiny import tiny_engine, tiny_model

SPECS = {
    "plain": SpecConfig(speculative_algorithm="none"),
    "chain": SpecConfig(speculative_algorithm="MTP", speculative_num_steps=3),
    "tree": SpecConfig(
        speculative_algorithm="MTP", speculative_num_steps=3, speculative_eagle_topk=2, speculative_num_draft_tokens=8
    ),
}  # fmt: skip
RULES: dict[str, dict[str, Any]] = {
    "repetition": {"repetition_penalty": 1.4},
    "frequency": {"frequency_penalty": 0.8, "presence_penalty": 0.3},
    "bias": {"logit_bias": {3: 2.0, 5: -4.0}},
    "allowed": {"allowed_token_ids": (1, 2, 3, 4, 7)},
    "min_tokens": {"min_tokens": 9, "stop_token_ids": tuple(range(12))},
    "log-probabilities": {"logprobs": 3},
    "without": {},
}
Texts = dict[str, tuple[list[int], list[TokenLogprob]]]


def texts(engine: Engine, temperature: float, rounds: int = 2) -> Texts:
    """Of requests with each rule, together, twice: a seat's second request has another rule than its first."""
    found: Texts = {}
    for turn in range(rounds):
        rules = [*RULES.items()][turn:] + [*RULES.items()][:turn]
        for number, (name, rule) in enumerate(rules):
            prompt = [(5 * number + 3 * place + turn) % 30 + 1 for place in range(3 + number % 3)]
            params = {"max_tokens": 20, "temperature": temperature, "seed": number} | rule
            engine.add(Request(f"{name} {turn}", prompt, SamplingParams(**params)))
            found[f"{name} {turn}"] = [], []
        while engine.has_work:
            for event in engine.step():
                assert event.error is None, event.error
                found[event.id][0].extend(event.tokens)
                found[event.id][1].extend(event.logprobs or [])
    return found


def count_launched(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The requests of each pass that is not replayed."""
    launched: list[int] = []
    run = runner.run

    def counting(spans: Any, draft_depth: int) -> Any:
        launched.append(len(spans))
        return run(spans, draft_depth)

    monkeypatch.setattr(runner, "run", counting)
    return launched


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_rules_in_tables_are_captured(spec: SpecConfig, temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    eager = texts(tiny_engine(tiny_model("mimo", kernels="torch"), spec, seats=8), temperature)
    engine = tiny_engine(tiny_model("mimo", kernels="torch"), spec, recorder=Again(), seats=8)
    launched = count_launched(runner_of(engine), monkeypatch)
    captured = texts(engine, temperature)
    assert {name: tokens for name, (tokens, _) in captured.items()} == {name: tokens for name, (tokens, _) in eager.items()}
    assert launched == []
    for name, (tokens, logprobs) in captured.items():
        assert len(logprobs) == (len(tokens) if name.startswith("log-") else 0)
        for actual, expected in zip(logprobs, eager[name][1], strict=True):
            assert (actual.rank, [token for token, _ in actual.top]) == (expected.rank, [token for token, _ in expected.top])
            assert actual.logprob == pytest.approx(expected.logprob, abs=1e-5) and len(actual.top) == 3


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_captured_rules_read_nothing_on_the_host(spec: SpecConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = tiny_engine(tiny_model("mimo", kernels="torch"), spec, recorder=Watched(), seats=8)
    blinded(engine, monkeypatch)
    assert all(tokens for tokens, _ in texts(engine, 0.9, rounds=1).values())


@pytest.mark.parametrize(
    "rule",
    [{"bad_words": ("x",)}, {"min_tokens": 4, "stop_token_ids": tuple(range(33))}],
    ids=["words of several tokens", "more stop tokens than the table holds"],
)
def test_other_rules_are_launched_beside_captured_ones(rule: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    words = [[1, 2]] if "bad_words" in rule else []

    def both(engine: Engine) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {"rule": [], "other": []}
        engine.add(Request("rule", [3, 1, 4], SamplingParams(max_tokens=12, temperature=0.0, **rule), words))
        engine.add(Request("other", [3, 1, 4], SamplingParams(max_tokens=12, temperature=0.0, repetition_penalty=1.2)))
        while engine.has_work:
            for event in engine.step():
                found[event.id] += event.tokens
        return found

    engine = tiny_engine(tiny_model("mimo", kernels="torch"), SPECS["chain"], recorder=Again(), seats=4)
    launched = count_launched(runner_of(engine), monkeypatch)
    assert both(engine) == both(tiny_engine(tiny_model("mimo", kernels="torch"), SPECS["chain"], seats=4))
    assert launched[0] == 2, "prompts of both, together"
    assert len(launched) > 2 and set(launched[1:]) == {1}
