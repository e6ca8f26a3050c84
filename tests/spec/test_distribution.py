"""Speculation does not change what is sampled: chi-square over whole engine runs of a real, if tiny, model.

Each transform and rule by itself is held to its exact law in tests/parity."""

from __future__ import annotations

from collections import Counter
from functools import cache

import pytest
from scipy.stats import chi2_contingency

from mtpserve.core.sampling import SamplingParams
from mtpserve.layers.decoder import DecoderModel
from tests import selection
from tests.tiny import VOCAB, run, tiny_engine, tiny_model

DRAWS, BATCH = 32_000 if selection.ALL else 6000, 500


def first_two(
    model: DecoderModel, drafts: int, draws: int, seed: int, token_map: list[int] | None = None, **transforms: float
) -> Counter[tuple[int, ...]]:
    """The first token comes from the prompt's step; the second is a draft that was kept, or what replaced it."""
    counts: Counter[tuple[int, ...]] = Counter()
    engine = tiny_engine(model, drafts, pages=BATCH * 6, page_size=8, budget=BATCH * 8, seats=BATCH, token_map=token_map)
    for start in range(0, draws, BATCH):
        # One token more than is counted, or nothing would be drafted for the second.
        params = [SamplingParams(max_tokens=3, seed=seed + start + i, **transforms) for i in range(BATCH)]  # type: ignore[arg-type]
        counts.update(tuple(tokens[:2]) for tokens in run(engine, [[5, 11, 3]] * BATCH, params))
    assert drafts == 0 or engine.stats.accepted_tokens_total > draws / 200
    return counts


def p_value(one: Counter[tuple[int, ...]], other: Counter[tuple[int, ...]]) -> float:
    """Cells with few draws are added up: the test's approximation needs about five in each."""
    common = [pair for pair in one | other if one[pair] + other[pair] >= 20]
    table = [
        [counts[pair] for pair in common] + [sum(counts.values()) - sum(counts[pair] for pair in common) + 1] for counts in (one, other)
    ]
    return float(chi2_contingency(table).pvalue)


@cache
def plain_draws() -> Counter[tuple[int, ...]]:
    return first_two(tiny_model(), 0, DRAWS, 0, temperature=0.7)


def test_the_first_two_tokens_of_plain_and_speculative_decoding() -> None:
    model = tiny_model()
    assert p_value(plain_draws(), first_two(model, 3, DRAWS, 10**6, temperature=0.7)) > 1e-4


def test_drafting_without_the_likeliest_tokens_changes_nothing() -> None:
    model, plain = tiny_model(), plain_draws()
    seconds = Counter(token for (_, token), times in plain.items() for _ in range(times))
    token_map = sorted(set(range(VOCAB)) - {token for token, _ in seconds.most_common(6)} - set(range(0, VOCAB, 3)))
    assert p_value(plain, first_two(model, 3, DRAWS, 2 * 10**6, token_map, temperature=0.7)) > 1e-4


@pytest.mark.thorough  # tests/spec/test_accept.py sees it without a model
def test_a_lenient_acceptance_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above can fail: drafts accepted with 1.1 times their chance are found out."""
    from mtpserve.spec.verify import reject as module

    model, true_at = tiny_model(kernels="torch"), module.at
    plain = plain_draws()
    monkeypatch.setattr(module, "at", lambda probs, tokens: true_at(probs, tokens) * (1 / 1.3 if probs.is_contiguous() else 1.0))
    assert p_value(plain, first_two(model, 3, DRAWS, 10**6, temperature=0.7)) < 1e-4
