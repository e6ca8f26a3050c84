"""Log-probabilities under speculation are plain decoding's: of the output, of its alternatives, of the prompt; raw and processed."""

from __future__ import annotations

import math

import pytest
import torch

from mtpserve.config import SpecConfig
from mtpserve.core.request import Request, TokenLogprob
from mtpserve.core.sampling import SamplingParams
from mtpserve.engine.engine import Engine
from tests.spec.test_trees import tree
from tests.tiny import VOCAB, prompts, tiny_engine, tiny_model

Scores = dict[str, list[TokenLogprob]]
SHAPES: dict[str, int | SpecConfig] = {"chain": 3, "tree": tree(3, 3, 9), "n-gram": SpecConfig(speculative_algorithm="NGRAM")}


def scores(engine: Engine, params: list[SamplingParams]) -> tuple[dict[str, list[int]], Scores, Scores]:
    for i, (prompt, each) in enumerate(zip(prompts(len(params), longest=40), params, strict=True)):
        engine.add(Request(str(i), prompt, each))
    tokens: dict[str, list[int]] = {}
    output: Scores = {}
    prompt_scores: Scores = {}
    while engine.has_work:
        for event in engine.step():
            assert event.error is None
            assert event.logprobs is None or len(event.logprobs) == len(event.tokens)
            tokens.setdefault(event.id, []).extend(event.tokens)
            output.setdefault(event.id, []).extend(event.logprobs or [])
            prompt_scores.setdefault(event.id, []).extend(event.prompt_logprobs or [])
    return tokens, output, prompt_scores


def close(one: Scores, other: Scores) -> None:
    assert one.keys() == other.keys()
    for id in one:
        assert len(one[id]) == len(other[id])
        for a, b in zip(one[id], other[id], strict=True):
            assert math.isclose(a.logprob, b.logprob, abs_tol=1e-4) and a.rank == b.rank
            assert [token for token, _ in a.top] == [token for token, _ in b.top]
            assert torch.allclose(torch.tensor([p for _, p in a.top]), torch.tensor([p for _, p in b.top]), atol=1e-4)


PARAMS = [
    SamplingParams(max_tokens=20, temperature=0, logprobs=5, prompt_logprobs=2),
    SamplingParams(max_tokens=20, temperature=0, logprobs=0, frequency_penalty=1.0),
    SamplingParams(max_tokens=20, temperature=0, prompt_logprobs=0),
    SamplingParams(max_tokens=20, temperature=0, logprobs=3, logit_bias={3: 5.0}, stop_token_ids=(3,)),
    SamplingParams(max_tokens=20, temperature=0),
]


@pytest.mark.parametrize("processed", [False, True])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_they_are_plain_decodings(shape: int | SpecConfig, processed: bool) -> None:
    model = tiny_model()
    plain = scores(tiny_engine(model, 0, processed_logprobs=processed), PARAMS)
    for pages, budget in ((500, 64), (75, 30)):
        found = scores(tiny_engine(model, shape, pages=pages, budget=budget, processed_logprobs=processed), PARAMS)
        assert found[0] == plain[0]
        close(found[1], plain[1])
        close(found[2], plain[2])
    lengths = {id: len(tokens) for id, tokens in plain[0].items()}
    assert {id: len(found) for id, found in plain[1].items()} == {"0": lengths["0"], "1": lengths["1"], "2": 0, "3": lengths["3"], "4": 0}
    asked = prompts(len(PARAMS), longest=40)
    assert [len(plain[2][str(i)]) for i in range(5)] == [len(asked[0]) - 1, 0, len(asked[2]) - 1, 0, 0]


def test_raw_and_processed_differ_where_a_rule_bites() -> None:
    model = tiny_model()
    params = [SamplingParams(max_tokens=6, temperature=1.0, seed=1, top_k=2, logprobs=4, logit_bias={5: 3.0})]
    raw, processed = (scores(tiny_engine(model, tree(2, 2, 4), processed_logprobs=mode), params) for mode in (False, True))
    assert raw[0] == processed[0]
    for one, other in zip(raw[1]["0"], processed[1]["0"], strict=True):
        assert sum(math.exp(p) for _, p in other.top) == pytest.approx(1, abs=1e-4), "two tokens are left"
        assert sum(p > -math.inf for _, p in other.top) == 2 and all(p > -math.inf for _, p in one.top)
        assert dict(one.top) != dict(other.top)


def test_ranks_and_order() -> None:
    output = scores(tiny_engine(tiny_model(), 3), [SamplingParams(max_tokens=10, temperature=1.5, seed=3, logprobs=20)])[1]["0"]
    for score in output:
        values = [p for _, p in score.top]
        assert values == sorted(values, reverse=True) and 1 <= score.rank <= VOCAB
        assert score.rank > 20 or values[score.rank - 1] == pytest.approx(score.logprob)


def test_greedy_scores_are_processed_where_that_is_asked_for() -> None:
    """A greedy request has no distribution that it is drawn from: its scores are those of the logits after its rules."""
    params = [SamplingParams(max_tokens=4, temperature=0, logprobs=1, logit_bias={5: 3.0})]
    raw, processed = (scores(tiny_engine(tiny_model(), 0, processed_logprobs=mode), params) for mode in (False, True))
    assert raw[0] == processed[0]
    assert all(one.logprob != other.logprob for one, other in zip(raw[1]["0"], processed[1]["0"], strict=True))
