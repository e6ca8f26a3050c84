"""What rounding is measured to do, and that plain decoding with itself stays within it."""

from __future__ import annotations

import math
from functools import cache

import pytest

from mtpserve.core.request import TokenLogprob
from mtpserve.core.sampling import SamplingParams
from mtpserve.engine.startup.planning import plan
from mtpserve.tools.prove.rounding import ProvenLLM, Rounding, Share, chance_of, gap_error, prefers_another, rounding_of, scores
from tests import selection

TEXTS, TOKENS = (8, 40) if selection.ALL else (4, 16)
SMALL = {"model": "demo", "speculative_algorithm": "none", "max_total_tokens": 8192, "max_running_requests": 32}


def score(*top: tuple[int, float]) -> TokenLogprob:
    return TokenLogprob(top[0][1], 1, list(top))


def test_the_error_of_a_gap() -> None:
    one, two = score((1, -1.0), (2, -2.0), (3, -3.0)), score((2, -1.5), (1, -1.25), (9, -4.0))
    assert gap_error(one, one) == 0.0
    assert gap_error(one, two) == pytest.approx(0.75)  # +0.25 and -0.5; what only one of them has does not count
    assert prefers_another(one, 2) and prefers_another(one, 9) and not prefers_another(one, 1)
    assert not prefers_another(score((1, -1.0), (2, -1.0)), 2), "an exact tie"


def test_the_chance_of_a_count() -> None:
    assert chance_of(Share(0, 100), Share(0, 100), 2.0) == 1.0
    # Of one event in all, the chance that it falls to the first is its part of the weight: 2 * 100 / (2 * 100 + 100).
    assert chance_of(Share(1, 100), Share(0, 100), 2.0) == pytest.approx(2 / 3)
    assert chance_of(Share(2, 100), Share(1, 100), 1.0) == pytest.approx(0.5)
    assert chance_of(Share(20, 1000), Share(10, 1000), 2.0) > 0.3
    assert chance_of(Share(60, 1000), Share(10, 1000), 2.0) < 1e-3 and chance_of(Share(300, 1000), Share(10, 1000), 2.0) < 1e-9
    assert chance_of(Share(3, 3600), Share(40, 3600), 2 * 3.4e-4) < 1e-4 < chance_of(Share(1, 3600), Share(40, 3600), 2 * 3.4e-4)
    assert chance_of(Share(1, 10), Share(0, 0), 1.0) == 1.0 and chance_of(Share(1, 10), Share(0, 10), 0.0) == 0.0


@cache
def sampled(dtype: str) -> tuple[Rounding, list[list[TokenLogprob]], list[list[TokenLogprob]]]:
    """→ rounding; the scores of the same texts in another batch and chunks of another size."""
    asked = [([0, 5 + i], SamplingParams(max_tokens=TOKENS, seed=i, ignore_eos=True)) for i in range(TEXTS)]
    with ProvenLLM(**SMALL, dtype=dtype) as llm:
        answers = [llm.generate(prompt, sampling)[0].tokens for prompt, sampling in asked]
        texts = [prompt + answer for (prompt, _), answer in zip(asked, answers, strict=True)]
        here, planned = scores(llm, texts), plan(llm.config)
    with ProvenLLM(**SMALL, dtype=dtype, chunked_prefill_size=16) as llm:
        again = [scores(llm, [text])[0] for text in texts]
    return rounding_of({**SMALL, "dtype": dtype}, planned, here, texts, asked, answers), here, again


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_two_ways_to_compute_the_same_differ_within_the_bound(dtype: str) -> None:
    rounding, here, again = sampled(dtype)
    assert (rounding.dtype, rounding.reference) == ((dtype, "float32") if dtype == "bfloat16" else (dtype, "bfloat16"))
    assert len(rounding.errors) == TEXTS * (TOKENS + 1) and 0 < rounding.typical < rounding.bound
    assert rounding.scale == (1.0 if dtype == "bfloat16" else 2.0**-16 * math.sqrt(512))
    errors = [gap_error(one, two) for a, b in zip(here, again, strict=True) for one, two in zip(a, b, strict=True)]
    assert max(errors) <= rounding.bound
    # The bound says something: it is no more than a thousand times what is seen.
    assert rounding.bound <= 1e3 * max(errors) or max(errors) == 0
    assert rounding.explains(Share(0, 300), rounding.texts) and rounding.explains_gaps([0.0], 300)


def test_float16_rounds_less_than_bfloat16() -> None:
    less, more = sampled("float16")[0], sampled("bfloat16")[0]
    assert less.reference == "float32" and 0 < less.typical < more.typical
