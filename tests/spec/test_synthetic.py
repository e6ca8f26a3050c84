"""Acceptance by lot: it follows the curve, the seed decides, and the engine's books stay right."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import accumulate
from operator import mul

import pytest

from mtpserve.config import CacheConfig, EngineConfig, ModelConfig, SpecConfig
from mtpserve.core.errors import ConfigError
from mtpserve.core.request import Request
from mtpserve.core.sampling import SamplingParams
from mtpserve.engine.engine import Engine
from mtpserve.engine.startup.build import build_engine
from mtpserve.spec.curves import CURVES, Curve
from mtpserve.tools.prove.proof import prove
from tests.spec.diagonal import diagonal
from tests.tiny import VOCAB, prompts, run, tiny_engine, tiny_model

GLM = Curve("glm-5.2-mtp", CURVES["glm-5.2-mtp"])
LONG = 120


def tree(topk: int, steps: int, rows: int) -> SpecConfig:
    return SpecConfig(
        speculative_algorithm="MTP", speculative_num_steps=steps, speculative_eagle_topk=topk, speculative_num_draft_tokens=rows
    )


def committed(engine: Engine, drafts: int, params: Sequence[SamplingParams]) -> list[int]:
    """Tokens of every verification of `drafts` drafts that was not cut short, which is known before it runs."""
    written = {str(i): 0 for i in range(len(params))}
    for i, each in enumerate(params):
        engine.add(Request(str(i), [i % VOCAB, 3], each))
    found = []
    while engine.has_work:
        for event in engine.step():
            assert event.error is None
            if len(event.proposal.tokens) == drafts and written[event.id] + drafts + 1 < LONG:
                found.append(len(event.tokens))
                assert len(event.tokens) == event.num_accepted_tokens + 1 == len(event.proposal.path) + 1
                assert event.tokens[:-1] == [event.proposal.tokens[node - 1] for node in event.proposal.path]
            written[event.id] += len(event.tokens)
    engine.check_integrity()
    assert engine.stats.pages_used == 0 and set(written.values()) == {LONG}
    return found


def follows(found: list[int], expected: float) -> bool:
    """Within four standard errors."""
    mean = sum(found) / len(found)
    variance = sum((n - mean) ** 2 for n in found) / len(found)
    return len(found) > 500 and abs(mean - expected) < 4 * (variance / len(found)) ** 0.5


@pytest.mark.parametrize(("drafts", "temperature"), diagonal({"1": 1, "3": 3, "7": 7}, {"greedy": 0.0, "drawn": 0.8}))
def test_chains_follow_the_curve(drafts: int, temperature: float) -> None:
    engine = tiny_engine(tiny_model(), drafts, rates=GLM.rates(8), pages=1200, seats=32)
    params = [SamplingParams(max_tokens=LONG, temperature=temperature, seed=i) for i in range(32)]
    expected = 1 + sum(accumulate(GLM.rates(drafts), mul))
    assert abs(expected - GLM.lengths[drafts - 1]) < 0.15
    assert follows(committed(engine, drafts, params), expected)


def test_trees_follow_it_along_their_first_children() -> None:
    """All six of a tree of two and two of each: two of them lie one below the other, whichever come first."""
    engine = tiny_engine(tiny_model(), tree(2, 2, 7), rates=Curve("", (2.0, 2.5)).rates(8), pages=1200, seats=32)
    params = [SamplingParams(max_tokens=LONG, temperature=0, seed=i) for i in range(32)]
    found = committed(engine, 6, params)
    assert follows(found, 2.5) and set(found) == {2, 3}


@pytest.mark.parametrize("spec", [3, tree(3, 3, 9), SpecConfig(speculative_algorithm="MTP+NGRAM")], ids=["chain", "tree", "both"])
def test_all_or_nothing(spec: int | SpecConfig) -> None:
    """Everything accepted: as many as there are in a row. Nothing accepted: the text is that of plain decoding."""
    model, asked, greedy = tiny_model(), prompts(5), SamplingParams(max_tokens=30, temperature=0)
    nothing = tiny_engine(model, spec, rates=[0.0] * 16)
    assert run(nothing, asked, greedy) == run(tiny_engine(model, 0), asked, greedy)
    assert nothing.stats.accepted_tokens_total == 0 < nothing.stats.drafts_total
    everything = tiny_engine(model, spec, rates=[1.0] * 16)
    run(everything, asked, greedy)
    assert everything.stats.accepted_tokens_per_position[0] == everything.stats.drafts_total
    if spec == 3:
        assert everything.stats.accepted_tokens_total == everything.stats.draft_tokens_total


@pytest.mark.parametrize("spec", [3, tree(3, 3, 9)], ids=["chain", "tree"])
def test_the_seed_decides_in_any_company(spec: int | SpecConfig) -> None:
    model, asked = tiny_model(), prompts(8)
    params = [SamplingParams(max_tokens=24, temperature=0.8, seed=i) for i in range(8)]
    alone = [run(tiny_engine(model, spec, rates=GLM.rates(8)), [prompt], each)[0] for prompt, each in zip(asked, params, strict=True)]
    crowded = tiny_engine(model, spec, rates=GLM.rates(8), pages=45, budget=40)
    assert run(crowded, asked, params) == alone
    assert crowded.stats.preemptions_total > 0
    others = [SamplingParams(max_tokens=24, temperature=0.8, seed=i + 100) for i in range(8)]
    assert run(tiny_engine(model, spec, rates=GLM.rates(8)), asked, others) != alone


@pytest.mark.parametrize("spec", [SpecConfig(speculative_algorithm="NGRAM"), tree(3, 3, 9)], ids=["ngram", "tree"])
def test_rules_and_stops_hold(spec: SpecConfig) -> None:
    """N-gram drafts know nothing of what is forbidden."""
    model, asked = tiny_model(), [[2, 4, 6, 2, 4, 6, 2], [9, 8, 9, 8, 9, 8]]
    params = SamplingParams(max_tokens=24, temperature=0, allowed_token_ids=tuple(range(1, VOCAB, 2)), stop_token_ids=(7,), min_tokens=3)
    engine = tiny_engine(model, spec, rates=[0.95] * 16)
    for tokens in run(engine, asked, params):
        assert all(token % 2 for token in tokens)
        assert 7 not in tokens[:-1] and 7 not in tokens[:3] and (len(tokens) == 24 or tokens[-1] == 7)
    assert engine.stats.drafts_total > 0


def configured(**spec: str) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(dtype="float32"),
        cache=CacheConfig(max_total_tokens=1024),
        spec=SpecConfig(speculative_algorithm="MTP", **spec),  # type: ignore[arg-type]
    )


def test_it_is_said_loudly(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        engine = build_engine(configured(speculative_synthetic_acceptance="1.9,2.7"))
    assert engine.card.synthetic_acceptance == "1.9,2.7"
    assert "SYNTHETIC ACCEPTANCE" in caplog.text and "ends at 2 drafts" in caplog.text
    found = run(engine, [[5, 6, 7]], SamplingParams(max_tokens=20, temperature=0, ignore_eos=True))
    assert len(found[0]) == 20 and engine.stats.accepted_tokens_total > 0
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        assert build_engine(configured()).card.synthetic_acceptance is None
    assert "SYNTHETIC" not in caplog.text


def test_what_it_cannot_go_with() -> None:
    with pytest.raises(ConfigError, match="must be left out with --speculative-algorithm none"):
        SpecConfig(speculative_algorithm="none", speculative_synthetic_acceptance="1.9")
    with pytest.raises(ConfigError, match="threshold-acc must be 1 with --speculative-synthetic-acceptance"):
        SpecConfig(speculative_algorithm="MTP", speculative_synthetic_acceptance="1.9", speculative_accept_threshold_acc=0.5)
    with pytest.raises(ConfigError, match="nothing to prove"):
        prove({"speculative_algorithm": "MTP", "speculative_synthetic_acceptance": "1.9"}, ["a"], tokens=1, draws=1, tie=0.0)
