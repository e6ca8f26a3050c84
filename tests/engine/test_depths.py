"""Depths that are set while the engine serves: what is drafted changes with the next steps, the texts do not."""

from __future__ import annotations

import pytest

from mtpserve.config import SpecConfig
from mtpserve.core.request import Request, SpecChange
from mtpserve.core.sampling import SamplingParams
from mtpserve.engine.engine import Engine
from tests.tiny import prompts, run, tiny_engine, tiny_model

CHAIN = SpecConfig(speculative_algorithm="MTP", speculative_num_steps=3)
TREE = SpecConfig(speculative_algorithm="MTP", speculative_num_steps=3, speculative_eagle_topk=2, speculative_num_draft_tokens=8)
CHANGES = [
    SpecChange(num_steps=2),
    SpecChange(adaptive=False),
    SpecChange(num_steps=0),
    SpecChange(num_steps=1, reset=True),
    SpecChange(adaptive=True, num_steps=3),
]
PARAMS = [SamplingParams(max_tokens=40, temperature=0), SamplingParams(max_tokens=40, temperature=0.9, seed=3)]


def texts(engine: Engine, changes: list[SpecChange]) -> list[list[int]]:
    """A change every fourth step."""
    made: dict[str, list[int]] = {}
    for number, (prompt, params) in enumerate(zip(prompts(2, seed=1), PARAMS, strict=True)):
        made[str(number)] = []
        engine.add(Request(str(number), prompt, params))
    steps, left = 0, list(changes)
    while engine.has_work:
        for event in engine.step():
            made[event.id] += event.tokens
        steps += 1
        if steps % 4 == 0 and left:
            engine.set_spec(left.pop(0))
    assert not left
    return list(made.values())


@pytest.mark.parametrize("spec", [CHAIN, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("overlap", [0, 1])
def test_texts_do_not_depend_on_what_is_set(spec: SpecConfig, overlap: int) -> None:
    model = tiny_model()
    plain = texts(tiny_engine(model, 0), [])
    engine = tiny_engine(model, spec, adaptive=True, overlap=overlap)
    assert texts(engine, CHANGES) == plain
    report = engine.set_spec(SpecChange())
    assert report.state is not None and report.state == engine.stats.depths
    assert (report.state.adaptive, report.state.num_steps, report.configured) == (True, 3, 3)
    assert sum(report.steps_per_depth) > 0 and report.steps_per_depth[0] > 0 and report.costs.steps
    engine.check_integrity()


def test_nothing_is_drafted_at_a_depth_of_zero() -> None:
    engine = tiny_engine(tiny_model(), CHAIN, adaptive=True)
    engine.set_spec(SpecChange(num_steps=0))
    run(engine, prompts(2, seed=1), SamplingParams(max_tokens=9, temperature=0))
    assert engine.stats.draft_tokens_total == 0
    assert engine.stats.steps_per_depth[0] > 0 and not any(engine.stats.steps_per_depth[1:])


def test_a_fixed_depth_stays_and_its_steps_are_counted() -> None:
    engine = tiny_engine(tiny_model(), CHAIN)
    report = engine.set_spec(SpecChange(num_steps=1))
    assert report.state is None and report.fixed is not None and "--no-speculative-adaptive" in report.fixed
    run(engine, prompts(2, seed=1), SamplingParams(max_tokens=9, temperature=0))
    assert engine.stats.draft_tokens_per_position[2] > 0 and engine.stats.depths is None
    assert engine.stats.steps_per_depth[3] > 0 and not any(engine.stats.steps_per_depth[:3])


def test_without_speculation_no_depths_are_counted() -> None:
    engine = tiny_engine(tiny_model(), 0)
    run(engine, prompts(2, seed=1), SamplingParams(max_tokens=9, temperature=0))
    report = engine.set_spec(SpecChange())
    assert (report.configured, sum(report.steps_per_depth)) == (0, 0)
    assert report.fixed is not None and report.fixed.endswith("no speculation")
