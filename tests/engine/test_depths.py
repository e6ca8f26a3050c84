"""Depths that are set while the engine serves: what is drafted changes with the next steps, the texts do not."""

from __future__ import annotations

import pytest

from mtpserve.config import SpecConfig
from mtpserve.core.request import Request, TokenEvent
from mtpserve.core.sampling import SamplingParams
from mtpserve.core.stats.reports import SpecChange
from mtpserve.engine.engine import Engine
from tests.engine.harness import PROMPTS, Bench
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
    assert sum(report.steps_per_depth) > 0 and report.steps_per_depth[0] > 0
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


@pytest.mark.parametrize("pause", [0.0, 1.0, 50.0])
def test_a_callers_pause_is_no_part_of_a_step(pause: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step's time begins with the end of the one before, unless more than the step's own time has passed until it began."""
    engine, told, now = tiny_engine(tiny_model(), 1, adaptive=True), list[float](), 0.0
    assert engine.policy is not None
    monkeypatch.setattr(engine.policy, "stepped", lambda planned, passes, seconds: told.append(seconds))
    for module in ("engine", "depth.clock"):
        monkeypatch.setattr(f"mtpserve.engine.{module}.perf_counter", lambda: now)
    book = engine._commit

    def takes(leave: int) -> list[TokenEvent]:
        nonlocal now
        now += 2.0
        return book(leave)

    monkeypatch.setattr(engine, "_commit", takes)
    engine.add(Request("0", [3, 4, 5], SamplingParams(max_tokens=8, temperature=0)))
    while engine.has_work:
        engine.step()
        now += pause
    assert len(told) > 3 and set(told[1:]) == {2.0 + (pause if pause <= 2.0 else 0.0)}


def test_one_more_than_the_limit_is_a_crowd() -> None:
    bench = Bench(drafts=3, running=3, plain_above=2, accuracy=1.0)
    for name in list(PROMPTS)[:3]:
        bench.add(name, prompt=[1, 2, 3], max_tokens=30, seed=0)
    while bench.engine.stats.running < 3 or not bench.texts:
        bench.step()
    for _ in range(8):
        bench.step()
        assert bench.engine.stats.running == 3
    # Drafts that were made before all three ran are verified in the first of these steps.
    assert all(drafts == 0 for step in bench.runner.steps[-6:] for *_, drafts in step)
