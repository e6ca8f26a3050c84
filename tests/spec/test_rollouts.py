"""Several rollouts of a prompt hold its whole pages once, drafted or not, and so does the next group that begins with it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mtpserve.core.request import Request
from mtpserve.core.sampling import SamplingParams
from mtpserve.engine.engine import Engine
from tests.runtime.recorders import runner_of
from tests.spec.test_trees import tree
from tests.tiny import spec_of, tiny_engine, tiny_model

PAGE, ROLLOUTS, OUTPUT = 4, 8, 12
SHAPES = {"plain": spec_of(0), "chain": spec_of(3), "tree": tree(3, 3, 9), "n-gram": replace(spec_of(0), speculative_algorithm="NGRAM")}


def most_pages(engine: Engine, prompt: list[int], name: str) -> tuple[int, list[int]]:
    """The most pages that a group's rollouts held at once, and how many prompt tokens each found."""
    for number in range(ROLLOUTS):
        params = SamplingParams(max_tokens=OUTPUT, temperature=1.0, seed=number, ignore_eos=True)
        engine.add(Request(f"{name}-{number}", prompt, params, choices=0 if number else ROLLOUTS))
    most, found = 0, [0] * ROLLOUTS
    while engine.has_work:
        for event in engine.step():
            assert event.error is None, event.error
            found[int(event.id.partition("-")[2])] += event.num_cached_tokens
        most = max(most, engine.stats.pages_used)
    engine.check_integrity()
    return most, found


@pytest.mark.parametrize("shape", SHAPES)
def test_a_group_shares_its_prompts_pages(shape: str) -> None:
    prompt = [(7 * place + 3) % 31 + 1 for place in range(98)]
    engine = tiny_engine(tiny_model("mimo"), SHAPES[shape], page_size=PAGE)
    shared = len(prompt) // PAGE
    ahead = runner_of(engine).sizes.num_lookahead_tokens(0)
    own = -(-(len(prompt) + OUTPUT + ahead) // PAGE) - shared
    most, found = most_pages(engine, prompt, "first")
    assert found == [0, *[shared * PAGE] * (ROLLOUTS - 1)]
    assert shared + ROLLOUTS < most <= shared + ROLLOUTS * own < ROLLOUTS * shared
    most, found = most_pages(engine, prompt, "next")
    assert found == [shared * PAGE] * ROLLOUTS and most <= shared + ROLLOUTS * own
